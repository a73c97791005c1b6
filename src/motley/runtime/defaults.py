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
from motley.runtime.caching import CacheConfig, CachePlan, largest, sized_plan
from motley.runtime.crew import Crew, known_devices, make_crew
from motley.runtime.fitting import CacheFit, fit_cache
from motley.runtime.splitting import ModelSplit
from motley.split.placement import NONE, TENSOR
from motley.units import show_bytes

AUTO = "auto"
_CPU_SIZES = (
    (512, 8),
    (128, 8),
    (128, 1),
)  # tokens of a step, requests; then what is chosen where these do not fit
_GPU_SIZES = (2048, 128), (1024, 32), *_CPU_SIZES  # more is not faster on any GPU measured
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


def size_choices(
    n_batch: int | None, n_parallel: int | None, device_names: Sequence[str]
) -> list[tuple[int, int]]:
    """(tokens of a step, requests at a time), with defaults for None: the best first, then what takes less memory."""
    is_gpu = all(name.startswith("cuda") for name in device_names)
    defaults = _GPU_SIZES if is_gpu else _CPU_SIZES
    return list(dict.fromkeys((n_batch or batch, n_parallel or parallel) for batch, parallel in defaults))


def batch_sizes(n_batch: int | None, n_parallel: int | None, device_names: Sequence[str]) -> tuple[int, int]:
    """The first of `size_choices`."""
    return size_choices(n_batch, n_parallel, device_names)[0]


def tokens_wanted(n_ctx: int | None, trained: int, cache: CacheConfig) -> int:
    """Tokens that a cache should have room for, beside what each request takes."""
    limit = _REQUEST_TOKENS if cache.max_tokens is None else min(_REQUEST_TOKENS, cache.max_tokens)
    return min(n_ctx or trained, limit)


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
    n_fit = _tokens_that_fit(whole.plan, split, is_limited=is_limited, **sizes)
    n_ctx = min(trained, max(n_fit, cache.block_size))
    if n_ctx < trained:
        split = split_for(n_ctx)
    n_held = max(_blocks(n_ctx, cache), n_parallel * min(_blocks(n_ctx, cache), _REQUEST_TOKENS))
    held = cache if is_limited else replace(cache, max_tokens=min(n_held, max(n_fit, cache.block_size)))
    notice = _context_notice(whole.plan, n_ctx, trained, **sizes) if n_ctx < trained else None
    return ContextChoice(n_ctx, split, fit_cache(split, backends, held, **sizes), notice)


def _blocks(n_tokens: int, cache: CacheConfig) -> int:
    """`n_tokens`, rounded up to whole blocks."""
    return -(-n_tokens // cache.block_size) * cache.block_size


def _tokens_that_fit(
    plan: CachePlan, split: ModelSplit, *, is_limited: bool, n_batch: int, n_parallel: int
) -> int:
    """The most tokens of `plan` that the default cache may hold; windows of all requests are counted.

    Unless the user has set a limit, the CPU devices of a host take at most a part of its memory. A host that was not
    asked is taken to have as much memory as this one.
    """
    here = host_bytes()
    members: dict[str | None, list[int]] = {}
    limits: dict[str | None, int] = {}
    for index, device in enumerate(split.crew.devices):
        memory = here if device.offer is None else device.offer.memory
        if memory is not None and not device.is_gpu and not is_limited:
            members.setdefault(device.host, []).append(index)
            limits[device.host] = memory // _HOST_PART

    def fits(n_blocks: int) -> bool:
        sized = sized_plan(plan, n_blocks, n_batch, n_parallel, 0)
        if any(new.n_blocks > old.n_blocks for new, old in zip(sized.groups, plan.groups, strict=True)):
            return False
        n_bytes = _bytes_of_blocks(sized)
        return all(sum(n_bytes[i] for i in own) <= limits[host] for host, own in members.items())

    # Not the blocks of the first group: if all layers have windows, it has as many as these need, for any context.
    most = n_parallel * -(-split.options.n_ctx // plan.config.block_size)
    return largest(max(most, plan.groups[0].n_blocks), fits) * plan.config.block_size


def _bytes_of_blocks(plan: CachePlan) -> list[int]:
    """Bytes of the blocks on each device, without recurrent states."""
    return [
        sum(group.n_blocks * plan.block_bytes(device, group) for group in plan.groups)
        for device in range(len(plan.heads))
    ]


def _context_notice(plan: CachePlan, chosen: int, trained: int, *, n_batch: int, n_parallel: int) -> str:
    config, dim = plan.config, plan.head_dim
    now = config.k_type.head_bytes(dim) + config.v_type.head_bytes(dim)
    most = trained if config.max_tokens is None else min(trained, config.max_tokens)
    taken = _bytes_of_blocks(sized_plan(plan, chosen // config.block_size, n_batch, n_parallel, 0))
    more = ""
    for kind in map(get_cache_type, _SMALLER_TYPES):
        if 2 * kind.head_bytes(dim) >= now:
            continue
        other = replace(plan, config=replace(config, k_type=kind, v_type=kind))

        def fits(n_blocks: int, other: CachePlan = other) -> bool:
            needed = _bytes_of_blocks(sized_plan(other, n_blocks, n_batch, n_parallel, 0))
            return all(n <= have for n, have in zip(needed, taken, strict=True))

        n_tokens = min(trained, largest(most // config.block_size, fits) * config.block_size)
        if n_tokens > chosen:  # not where the user limits the tokens themselves
            more = f"; with -ctk {kind.name} -ctv {kind.name} it would be {n_tokens}"
        break
    return f"the context is {chosen} tokens: the model's {trained} do not fit{more} (-c asks for a size)"
