"""Loads a model for a command, with a progress bar."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from motley.cli import options
from motley.cli.console import loading_bar, say
from motley.llm import LLM
from motley.units import show_bytes

_OWN = {"verbose"}  # flags that `motley.LLM` does not have
# The names in `motley.LLM` of flags that have another name here.
_LLM_NAMES = {"ctx_size": "n_ctx", "threads": "n_threads", "device": "devices"}


@dataclass(frozen=True)
class CrewOptions:
    """The flags for the devices and the split of a model."""

    ctx_size: options.CtxSize = 0
    backend: options.Backend = "auto"
    threads: options.Threads = None
    device: options.Device = "auto"
    split_mode: options.SplitMode = None
    tensor_split: options.TensorSplit = None
    device_memory: options.DeviceMemory = None
    split_experts: options.SplitExperts = "auto"
    n_expert_used: options.NExpertUsed = None
    n_layer_exit: options.NLayerExit = None
    verbose: options.Verbose = False

    def arguments(self) -> dict[str, Any]:
        """The flags as keyword arguments of `motley.LLM`."""
        values = {
            _LLM_NAMES.get(f.name, f.name): getattr(self, f.name) for f in fields(self) if f.name not in _OWN
        }
        return values | {"n_ctx": self.ctx_size or None}


@dataclass(frozen=True)
class LoadOptions(CrewOptions):
    """All flags that `motley.LLM` takes: those of `CrewOptions` and those of the KV cache."""

    cache_type_k: options.CacheTypeK = "f16"
    cache_type_v: options.CacheTypeV = "f16"
    kv_rotation: options.KvRotation = True
    kv_block_size: options.KvBlockSize = 32
    kv_cache_tokens: options.KvCacheTokens = None
    kv_cache_bytes: options.KvCacheBytes = None
    kv_cache_demand_paged: options.KvDemandPaged = False
    prefix_cache: options.PrefixCache = True


def load(path: Path, chosen: LoadOptions) -> LLM:
    with loading_bar(f"Loading {path.name}") as (progress, compiling):
        # A command runs one sequence, and reserves memory for one.
        llm = LLM(path, n_parallel=1, progress=progress, compiling=compiling, **chosen.arguments())
    if llm.chosen_devices is not None:
        say(llm.chosen_devices)
    for notice in llm.notices:
        say(f"note: {notice}")
    if chosen.verbose:
        for detail in llm.details:
            say(detail)
    devices = llm.device_memory()
    total = sum(memory["weights"] for memory in devices.values())
    say(f"loaded {show_bytes(total)} in {llm.load_seconds:.2f} s")
    if llm.warm_up.kernels:
        say(str(llm.warm_up))
    if len(devices) > 1:
        shares = (
            f"{name} {m['weights'] / total:.1%} ({show_bytes(m['weights'])})" for name, m in devices.items()
        )
        say(f"weights: {', '.join(shares)}")
    return llm
