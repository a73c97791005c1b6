"""Open a model for a command, with a progress bar."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from motley.cli import options
from motley.cli.console import loading_bar, say
from motley.llm import LLM
from motley.units import show_bytes

# What `motley.LLM` calls a flag that has another name here.
_LLM_NAMES = {"ctx_size": "n_ctx", "threads": "n_threads", "device": "devices"}


@dataclass(frozen=True)
class CrewOptions:
    """The flags that say where and how a model runs."""

    ctx_size: options.CtxSize = 0
    backend: options.Backend = "auto"
    threads: options.Threads = None
    device: options.Device = "cpu"
    split_mode: options.SplitMode = None
    tensor_split: options.TensorSplit = None
    device_memory: options.DeviceMemory = None

    def arguments(self) -> dict[str, Any]:
        """As keywords of `motley.LLM`."""
        values = {_LLM_NAMES.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        return values | {"n_ctx": self.ctx_size or None}


@dataclass(frozen=True)
class LoadOptions(CrewOptions):
    """All flags that `motley.LLM` takes: those of the KV cache too."""

    cache_type_k: options.CacheTypeK = "f16"
    cache_type_v: options.CacheTypeV = "f16"
    kv_rotation: options.KvRotation = True
    kv_block_size: options.KvBlockSize = 32
    kv_cache_tokens: options.KvCacheTokens = None
    kv_cache_bytes: options.KvCacheBytes = None
    kv_cache_demand_paged: options.KvDemandPaged = False
    prefix_cache: options.PrefixCache = True


def load(path: Path, chosen: LoadOptions) -> LLM:
    with loading_bar(f"Loading {path.name}") as progress:
        # A command has one sequence, and memory for no more.
        llm = LLM(path, n_parallel=1, progress=progress, **chosen.arguments())
    for notice in llm.notices:
        say(f"note: {notice}")
    devices = llm.device_memory()
    total = sum(memory["weights"] for memory in devices.values())
    say(f"loaded {show_bytes(total)} in {llm.load_seconds:.2f} s")
    if len(devices) > 1:
        shares = (
            f"{name} {m['weights'] / total:.1%} ({show_bytes(m['weights'])})" for name, m in devices.items()
        )
        say(f"weights: {', '.join(shares)}")
    return llm
