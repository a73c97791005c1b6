"""How many layers' experts have to be on another device: the fewest with which the rest fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from motley.backends import Backend
from motley.errors import CacheError, ConfigError, DeviceError
from motley.models import DecoderParams
from motley.runtime.caching import CacheConfig, largest
from motley.runtime.crew import Crew, make_crew
from motley.runtime.fitting import fit_cache
from motley.runtime.splitting import ModelSplit
from motley.split.placement import TENSOR

_DEFAULT_TOKENS = 4096  # of context that have to fit, if the user names no context


def settle_experts(
    crew: Crew,
    params: DecoderParams,
    split_over: Callable[[Crew, int], ModelSplit],
    backends: Sequence[Backend],
    cache: CacheConfig,
    *,
    n_ctx: int | None,
    n_batch: int,
    n_parallel: int,
) -> Crew:
    """The crew with a number of layers whose experts are apart; the same crew if it has one, or no experts apart.

    Automatic: the fewest layers with which a context of `n_ctx` tokens fits (default: 4096, or the model's). If even
    all layers are not enough, all of them; planning the cache then raises the error, with numbers.
    `split_over(crew, n_ctx)` returns the model's split.
    """
    if crew.apart is None:
        return crew
    if params.experts is None:
        raise ConfigError(
            f"the model has no experts to be placed apart: it is {params.architecture!r}",
            hint="leave out n_cpu_moe (--n-cpu-moe, --cpu-moe) and expert_split",
        )
    if crew.apart.n_layers is not None:
        return crew

    n_wanted = n_ctx or min(_DEFAULT_TOKENS, params.n_ctx_train)

    def with_experts(n_kept: int) -> Crew:
        """The crew if the experts of the last `n_kept` layers stay with the rest of their layers."""
        assert crew.apart is not None
        return replace(crew, apart=replace(crew.apart, n_layers=params.n_layers - n_kept))

    def tokens_of(n_kept: int) -> int:
        """Tokens of the cache that fits beside the weights; 0 if none does."""
        split = split_over(with_experts(n_kept), n_wanted)
        try:
            fit = fit_cache(split, backends, cache, n_batch=n_batch, n_parallel=n_parallel)
        except (DeviceError, CacheError):
            return 0
        return fit.plan.groups[0].n_blocks * cache.block_size

    n_needed = max(1, min(n_wanted, tokens_of(0)))  # a limit of the cache may be lower
    return with_experts(largest(params.n_layers, lambda n_kept: tokens_of(n_kept) >= n_needed))


def experts_notice(asked: Crew, settled: Crew, params: DecoderParams) -> str | None:
    """The sentence about the number of layers that was chosen; None if the user named it."""
    if asked.apart is None or asked.apart.n_layers is not None or settled.apart is None:
        return None
    owner, n_layers = settled.apart.owner, settled.apart.n_layers
    where = "shared out apart" if owner is None else f"on {settled.label(owner)}"
    what = f"the routed experts of {n_layers} of {params.n_layers} layers are {where}"
    return f"{what}: the others fit beside the rest (--n-cpu-moe names a number)" if n_layers else None


def with_cpu_experts(crew: Crew) -> Crew | None:
    """The crew with those experts on the CPU that do not fit on its GPUs; None for a crew without GPUs.

    The CPU joins a crew that it is not in. The GPUs keep their budgets and their shares of the rest. Groups of devices
    stay as the user named them; so do devices that are all of other processes.
    """
    if crew.apart is not None or crew.groups or not any(device.is_gpu for device in crew.devices):
        return None
    if all(device.host is not None for device in crew.sharing):
        return None
    names = [device.full_name for device in crew.devices]
    names += ["cpu"] if all(device.is_gpu for device in crew.devices) else []
    made = make_crew(names, crew.mode if crew.mode == TENSOR else None, n_cpu_moe="auto")
    devices = (*crew.devices, *made.devices[len(crew) :])
    shares = tuple(
        own if made_share else made_share
        for own, made_share in zip((*crew.shares, Fraction(0)), made.shares, strict=False)
    )
    return replace(made, devices=devices, shares=shares, experts=crew.experts)
