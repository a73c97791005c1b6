"""Sentences for the user, before loading, about options that are not applied as given or are not advisable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from motley.backends import Backend
from motley.gguf import ModelSpec
from motley.kvcache.paging import can_page_on_demand
from motley.models import DecoderParams, rotation_size
from motley.runtime.caching import CacheConfig


def notices(
    spec: ModelSpec,
    params: DecoderParams,
    cache: CacheConfig,
    backends: Sequence[Backend],
    *,
    n_ctx: int,
    rotates: bool,
) -> tuple[str, ...]:
    """The notices about a model and its options. `rotates`: whether quantized K and V should be rotated."""
    return (*_of_cache(params, cache, n_ctx, rotates), *_of_devices(spec, cache, backends))


def _of_cache(params: DecoderParams, cache: CacheConfig, n_ctx: int, rotates: bool) -> Iterator[str]:
    if n_ctx > params.n_ctx_train:
        yield f"the model was trained with {params.n_ctx_train} tokens of context, not {n_ctx}"
    quantized = dict.fromkeys(kind.name for kind in (cache.k_type, cache.v_type) if kind.is_quantized)
    if quantized and rotates and not rotation_size(params.head_dim):
        yield (
            f"the {'/'.join(quantized)} KV cache is not rotated: a head's {params.head_dim} dims "
            "are not a multiple of 32"
        )


def _of_devices(spec: ModelSpec, cache: CacheConfig, backends: Sequence[Backend]) -> Iterator[str]:
    forms = sorted({info.type_name for info in spec.tensors.values() if len(info.shape) == 2})
    for device, backend in {backend.device: backend for backend in backends}.items():
        if cache.demand_paged and not backend.is_remote and not can_page_on_demand(device):
            why = "cuda-bindings is not installed" if device.type == "cuda" else "this system cannot do it"
            yield f"the KV cache on {device} is not demand-paged, all of it is taken now: {why}"
        if unpacked := [form for form in forms if backend.unpacks(form)]:
            yield (
                f"{' and '.join(unpacked)} weights have no packed kernel on {device}: "
                "they are unpacked to 16 bits a value"
            )
