"""The flags for loading a model, as arguments of `motley.LLM`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from motley.cli.options.cache import (
    CacheTypeK,
    CacheTypeV,
    KvBlockSize,
    KvCacheBytes,
    KvCacheTokens,
    KvDemandPaged,
    KvRotation,
    PrefixCache,
    StateType,
)
from motley.cli.options.devices import DeviceOptions
from motley.cli.options.model import (
    Backend,
    BatchSize,
    NExpertUsed,
    NLayerExit,
    Parallel,
    Threads,
    UBatchSize,
    Verbose,
)
from motley.cli.options.speculation import (
    DraftLayers,
    DraftMax,
    DraftMin,
    LookaheadFlag,
    LookupAnswers,
    ModelDraft,
    Spec,
)

_OWN = {
    "verbose",
    "gpu_layers",
    "main_gpu",
    "ubatch_size",
    "cpu_moe",
}  # flags that `motley.LLM` does not have
# The names in `motley.LLM` of flags that have another name here.
_LLM_NAMES = {
    "ctx_size": "n_ctx",
    "threads": "n_threads",
    "device": "devices",
    "batch_size": "n_batch",
    "parallel": "n_parallel",
    "model_draft": "draft_model",
}


@dataclass(frozen=True)
class CrewOptions(DeviceOptions):
    """The flags for the devices and for how a model runs on them."""

    batch_size: BatchSize = None
    ubatch_size: UBatchSize = None
    backend: Backend = "auto"
    threads: Threads = None
    n_expert_used: NExpertUsed = None
    n_layer_exit: NLayerExit = None
    verbose: Verbose = False

    @property
    def n_batch(self) -> int | None:
        """-b or -ub; the smaller one of both."""
        return min((n for n in (self.batch_size, self.ubatch_size) if n is not None), default=None)

    def arguments(self) -> dict[str, Any]:
        """The flags as keyword arguments of `motley.LLM`: plain values, which `motley serve` sends to its engine."""
        values = {
            _LLM_NAMES.get(f.name, f.name): getattr(self, f.name) for f in fields(self) if f.name not in _OWN
        }
        values = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        own = {"n_ctx": self.ctx_size or None, "n_batch": self.n_batch, "n_cpu_moe": self.layers_apart}
        return values | own


@dataclass(frozen=True)
class LoadOptions(CrewOptions):
    """All flags that `motley.LLM` takes: those of `CrewOptions` and those of the KV cache."""

    parallel: Parallel = None
    cache_type_k: CacheTypeK = "f16"
    cache_type_v: CacheTypeV = "f16"
    state_type: StateType = "f32"
    kv_rotation: KvRotation = True
    kv_block_size: KvBlockSize = 32
    kv_cache_tokens: KvCacheTokens = None
    kv_cache_bytes: KvCacheBytes = None
    kv_cache_demand_paged: KvDemandPaged = False
    prefix_cache: PrefixCache = True
    spec: Spec = None
    draft_max: DraftMax = None
    draft_min: DraftMin = None
    model_draft: ModelDraft = None
    draft_layers: DraftLayers = None
    lookahead: LookaheadFlag = None
    lookup_answers: LookupAnswers = 0
