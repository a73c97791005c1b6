"""Defaults that depend on the machine, for options that the user did not set: devices, batch sizes, context length.

Each default is chosen once, before anything is loaded, together with a sentence that tells the user about it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from motley.backends import Backend
from motley.errors import DeviceError
from motley.kvcache.types import get_cache_type
from motley.models import DecoderParams
from motley.runtime.budget import host_bytes
from motley.runtime.caching import CacheConfig, CachePlan
from motley.runtime.crew import Crew, known_devices, make_crew
from motley.runtime.fitting import CacheFit, fit_cache
from motley.runtime.splitting import ModelSplit
from motley.split.placement import NONE, TENSOR
from motley.units import show_bytes

AUTO = "auto"
_GPU_BATCH, _GPU_PARALLEL = 2048, 128  # tokens of a step, requests: more is not faster on any GPU measured
_CPU_BATCH, _CPU_PARALLEL = 512, 8
_REQUEST_TOKENS = 4096  # of each request: room in the cache by default
_HOST_PART = 16  # by default the KV cache takes at most 1/16 of the machine's memory
_MIN_FREE = 2**29  # of a GPU that is used by default: less is taken by torch, its libraries and activations
_SMALLER_TYPES = ("q8_0", "q4_0")


@dataclass(frozen=True)
class DeviceChoice:
    """Arguments of `make_crew`, and the sentence about what was chosen for the user: None if nothing was."""

    devices: str | Sequence[str]
    split_mode: str | None
    tensor_split: str | Sequence[float] | None
    notice: str | None = None


def choose_devices(
    devices: str | Sequence[str],
    split_mode: str | None,
    tensor_split: str | Sequence[float] | None,
    *,
    backend: str = AUTO,
    leaves_out: bool = True,
) -> DeviceChoice:
    """The devices of a crew. "auto": all GPUs that torch sees, or the CPU; GPUs split tensors by their free memory.

    `backend`: if the user names a backend, "auto" means the CPU. `leaves_out`: GPUs without room are left out if
    another one has room, unless the user gives proportions of all of them.
    """
    if not _is_auto(devices):
        return DeviceChoice(devices, split_mode, tensor_split)
    gpus = [name for name in known_devices() if name.startswith("cuda")] if backend == AUTO else []
    if gpus and importlib.util.find_spec("triton") is None:
        notice = f"devices: cpu. {gpus[0]} needs Triton: pip install 'motley-llm[cuda]'"
        return DeviceChoice("cpu", split_mode, tensor_split, notice)
    if not gpus:
        return DeviceChoice("cpu", split_mode, tensor_split, "devices: cpu (--device chooses others)")
    free, failed = _free_memory(gpus)
    found = {gpu: f"{gpu} ({failed.get(gpu, f'{show_bytes(free[gpu])} free')})" for gpu in gpus}
    is_split_given = (
        bool(tensor_split) if isinstance(tensor_split, str | list | tuple) else tensor_split is not None
    )
    is_full = {gpu: free[gpu] < _MIN_FREE for gpu in gpus}
    left_out = [gpu for gpu in gpus if is_full[gpu]] if leaves_out and not is_split_given else []
    chosen = [gpu for gpu in gpus if gpu not in left_out] or gpus
    used = chosen[:1] if split_mode == NONE else chosen
    named = ", ".join(found[gpu] for gpu in used)
    if without := [found[gpu] for gpu in left_out if gpu not in chosen]:
        named += f", not {' and '.join(without)}"
    if len(used) == 1:
        return DeviceChoice(chosen, split_mode, tensor_split, f"devices: {named} (--device chooses others)")
    mode = split_mode or TENSOR
    notice = f"devices: {named}, split by {mode} (--device, --split-mode and --tensor-split change it)"
    is_by_memory = not is_split_given and any(free.values())
    shares = [float(free[gpu]) for gpu in chosen] if is_by_memory else tensor_split
    return DeviceChoice(chosen, mode, shares, notice)


def _is_auto(devices: str | Sequence[str]) -> bool:
    if isinstance(devices, str):
        return devices.strip() == AUTO
    return isinstance(devices, list | tuple) and list(devices) == [AUTO]


def _free_memory(gpus: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Free bytes by GPU, and why GPUs cannot be used, which have none. DeviceError if that is so for all of them."""
    free, failed = dict.fromkeys(gpus, 0), {}
    for gpu in gpus:
        try:
            free[gpu] = _free_bytes(gpu)
        except RuntimeError as error:  # a GPU that is broken, or that another process has for itself
            failed[gpu] = (str(error).splitlines() or ["it fails"])[0]
    if len(failed) == len(gpus):
        raise DeviceError(
            f"{gpus[0]} cannot be used: {failed[gpus[0]]}", hint="--device cpu runs the model on the CPU"
        )
    return free, failed


def _free_bytes(gpu: str) -> int:
    return torch.cuda.mem_get_info(gpu)[0]


def chosen_crew(
    devices: str | Sequence[str],
    split_mode: str | None,
    tensor_split: str | Sequence[float] | None,
    device_memory: str | Sequence[str | int] | None,
    split_experts: str = AUTO,
    n_cpu_moe: int | str | None = None,
    expert_split: str | Sequence[float] | None = None,
    *,
    backend: str = AUTO,
) -> tuple[Crew, str | None]:
    """The requested or default crew, and the sentence about the default: None if nothing was chosen."""
    leaves_out = not device_memory  # these would be of all GPUs
    choice = choose_devices(devices, split_mode, tensor_split, backend=backend, leaves_out=leaves_out)
    crew = make_crew(
        choice.devices,
        choice.split_mode,
        choice.tensor_split,
        device_memory,
        split_experts,
        n_cpu_moe,
        expert_split,
    )
    return crew, choice.notice


def batch_sizes(n_batch: int | None, n_parallel: int | None, device_names: Sequence[str]) -> tuple[int, int]:
    """(tokens of a step, requests at a time), with defaults for None: larger ones if all devices are GPUs."""
    is_gpu = all(name.startswith("cuda") for name in device_names)
    batch, parallel = (_GPU_BATCH, _GPU_PARALLEL) if is_gpu else (_CPU_BATCH, _CPU_PARALLEL)
    return n_batch or batch, n_parallel or parallel


@dataclass(frozen=True)
class ContextChoice:
    """A model split for a context of `n_ctx` tokens, the cache that fits, and the sentence for the user."""

    n_ctx: int
    split: ModelSplit
    fit: CacheFit
    notice: str | None = None


def choose_context(
    n_ctx: int | None,
    split_for: Callable[[int], ModelSplit],
    params: DecoderParams,
    backends: Sequence[Backend],
    cache: CacheConfig,
    *,
    n_batch: int,
    n_parallel: int,
) -> ContextChoice:
    """The context length and the cache. Default length: the model's training context, reduced to what fits.

    The cache then holds one such sequence, or `_REQUEST_TOKENS` tokens of each request, whichever is more and fits.

    `split_for(n_ctx)` returns the model's split. On the CPU the default cache is limited to a part of the memory.
    """
    sizes = {"n_batch": n_batch, "n_parallel": n_parallel}
    if n_ctx is not None:
        split = split_for(n_ctx)
        return ContextChoice(n_ctx, split, fit_cache(split, backends, cache, **sizes))
    trained, is_limited = params.n_ctx_train, cache.max_tokens is not None or cache.max_bytes is not None
    split = split_for(trained)
    whole = fit_cache(split, backends, cache, **sizes)  # as much as the GPUs and the limits have room for
    n_fit = min(whole.plan.groups[0].n_blocks * cache.block_size, _host_tokens(whole.plan, split, is_limited))
    n_ctx = min(trained, max(n_fit, cache.block_size))
    if n_ctx < trained:
        split = split_for(n_ctx)
    n_held = max(_blocks(n_ctx, cache), n_parallel * min(_blocks(n_ctx, cache), _REQUEST_TOKENS))
    held = cache if is_limited else replace(cache, max_tokens=min(n_held, max(n_fit, cache.block_size)))
    notice = _context_notice(whole.plan, n_ctx, trained) if n_ctx < trained else None
    return ContextChoice(n_ctx, split, fit_cache(split, backends, held, **sizes), notice)


def _blocks(n_tokens: int, cache: CacheConfig) -> int:
    """`n_tokens`, rounded up to whole blocks."""
    return -(-n_tokens // cache.block_size) * cache.block_size


def _host_tokens(plan: CachePlan, split: ModelSplit, is_limited: bool) -> int:
    """The most tokens that the default cache of the CPU devices may hold; a limit set by the user is kept as it is.

    A host that was not asked is taken to have as much memory as this one.
    """
    here = host_bytes()
    n_bytes: dict[str | None, int] = {}  # of a block, by host
    memory: dict[str | None, int | None] = {}
    for index, device in enumerate(split.crew.devices):
        if not device.is_gpu:
            own = sum(plan.block_bytes(index, group) for group in plan.groups)
            n_bytes[device.host] = n_bytes.get(device.host, 0) + own
            memory[device.host] = here if device.offer is None else device.offer.memory
    counts = [
        known // _HOST_PART // n_bytes[host]
        for host, known in memory.items()
        if known is not None and n_bytes[host]
    ]
    return 2**62 if is_limited or not counts else min(counts) * plan.config.block_size


def _context_notice(plan: CachePlan, chosen: int, trained: int) -> str:
    config, dim = plan.config, plan.head_dim
    now = config.k_type.head_bytes(dim) + config.v_type.head_bytes(dim)
    more = ""
    for name in _SMALLER_TYPES:
        other = 2 * get_cache_type(name).head_bytes(dim)
        if other < now:
            n_tokens = min(trained, chosen * now // other // config.block_size * config.block_size)
            more = f"; with -ctk {name} -ctv {name} it would be {n_tokens}"
            break
    return f"the context is {chosen} tokens: the model's {trained} do not fit{more} (-c asks for a size)"
