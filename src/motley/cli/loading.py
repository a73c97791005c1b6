"""Open a model for a command, with a progress bar."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from motley.cli import options
from motley.cli.console import loading_bar
from motley.llm import LLM

# What `motley.LLM` calls a flag that has another name here.
_LLM_NAMES = {"ctx_size": "n_ctx", "threads": "n_threads", "device": "devices"}


@dataclass(frozen=True)
class LoadOptions:
    """The flags that `motley.LLM` takes."""

    ctx_size: options.CtxSize = 0
    backend: options.Backend = "auto"
    threads: options.Threads = None
    device: options.Device = "cpu"
    split_mode: options.SplitMode = None
    tensor_split: options.TensorSplit = None
    device_memory: options.DeviceMemory = None
    cache_type_k: options.CacheTypeK = "f16"
    cache_type_v: options.CacheTypeV = "f16"
    kv_rotation: options.KvRotation = True
    kv_block_size: options.KvBlockSize = 32
    kv_cache_tokens: options.KvCacheTokens = None
    kv_cache_bytes: options.KvCacheBytes = None
    kv_cache_demand_paged: options.KvDemandPaged = False
    prefix_cache: options.PrefixCache = True

    def arguments(self) -> dict[str, object]:
        """As keywords of `motley.LLM`."""
        values = {_LLM_NAMES.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        return values | {"n_ctx": self.ctx_size or None}


def load(path: Path, chosen: LoadOptions) -> LLM:
    with loading_bar(f"Loading {path.name}") as progress:
        arguments = chosen.arguments()
        # A command has one sequence, and memory for no more.
        return LLM(path, n_parallel=1, progress=progress, **arguments)  # type: ignore[arg-type]
