"""Reads and writes the K/V of a layer with all heads in the model's order, independent of the split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import torch

from motley.graph.ops import CacheStore, Rope, Weight, cache_layer
from motley.kvcache.session_file import Identity
from motley.kvcache.types import TILE, CacheType
from motley.models import BatchShape
from motley.ownership import Split
from motley.runtime.caching import CachePlan
from motley.runtime.splitting import ModelSplit
from motley.split.collectives import put, take

_SAMPLE_BYTES = 4096  # of each end of each tensor: enough to tell a model from a fine-tuned version of it

Planes = dict[str, torch.Tensor]  # by name: (tokens, heads, tiles, width)


class Parts(Protocol):
    """Access to the parts of a layer's K/V on all devices (`Runner`)."""

    def gather(self, layer: int, slots: torch.Tensor) -> Sequence[Sequence[Mapping[str, torch.Tensor]]]: ...

    def scatter(
        self, layer: int, slots: torch.Tensor, parts: Sequence[Sequence[Mapping[str, torch.Tensor]]]
    ) -> None: ...


class CacheExchange:
    """Reads and writes planes of whole layers, whichever devices own their heads."""

    def __init__(self, split: ModelSplit, plan: CachePlan, parts: Parts) -> None:
        whole = split.split(BatchShape(1, 1))
        self._parts = parts
        self._n_devices = len(split.crew)
        self._repeat = split.options.kv_repeat
        self._n_heads = split.params.n_kv_heads
        self._head_dim = plan.head_dim
        self._kinds = plan.config.k_type, plan.config.v_type
        self._words = {}
        for node in whole.graph.nodes:
            if isinstance(node.op, CacheStore):
                state = whole.ways[node].inputs[0]
                layer = cache_layer(node.inputs[0])
                self._words[layer] = state.word if isinstance(state, Split) else None

    def read(self, layer: int, slots: Sequence[int]) -> list[Planes]:
        """The planes of K and of V, with each KV head once."""
        whole = [self._empty(kind, len(slots), self._n_heads * self._repeat) for kind in self._kinds]
        for device, own in enumerate(self._parts.gather(layer, torch.tensor(slots))):
            for part, planes in zip(own, whole, strict=True):
                for name, items in part.items():
                    self._put(planes[name], items, layer, device)
        return [{name: items[:, :: self._repeat] for name, items in planes.items()} for planes in whole]

    def write(self, layer: int, slots: Sequence[int], planes: Sequence[Planes]) -> None:
        """Stores planes as `read` returns them; a repeated head is stored on each device that has it."""
        whole = [
            {name: items.repeat_interleave(self._repeat, 1) for name, items in part.items()}
            for part in planes
        ]
        parts = [
            [{name: self._take(items, layer, device) for name, items in part.items()} for part in whole]
            for device in range(self._n_devices)
        ]
        self._parts.scatter(layer, torch.tensor(slots), parts)

    def part_sizes(self, n_tokens: int) -> Iterator[list[tuple[str, tuple[int, ...], torch.dtype]]]:
        """Name, shape and type of each plane of `n_tokens` tokens: first those of K, then those of V."""
        for kind in self._kinds:
            empty = self._empty(kind, n_tokens, self._n_heads)
            yield [(name, tuple(items.shape), items.dtype) for name, items in empty.items()]

    def _empty(self, kind: CacheType, n_tokens: int, n_heads: int) -> Planes:
        n_tiles = -(-self._head_dim // TILE)
        return {
            p.name: torch.empty((n_tokens, n_heads, n_tiles, p.width), dtype=p.dtype) for p in kind.planes
        }

    def _put(self, whole: torch.Tensor, part: torch.Tensor, layer: int, device: int) -> None:
        word = self._words[layer]
        if word is not None:
            put(whole, part, 1, word, device)
        else:
            whole.copy_(part)

    def _take(self, whole: torch.Tensor, layer: int, device: int) -> torch.Tensor:
        word = self._words[layer]
        return whole if word is None else take(whole, 1, word, device)


def to_bytes(planes: Mapping[str, torch.Tensor]) -> bytes:
    """The bytes of all planes, concatenated."""
    return b"".join(items.contiguous().view(torch.uint8).numpy().tobytes() for items in planes.values())


def identity_of(split: ModelSplit, plan: CachePlan, salt: bytes = b"") -> Identity:
    """The properties in which a saved cache must agree with this model. `salt`: that of the prefix key.

    Reads a few bytes of each tensor.
    """
    params, options = split.params, split.options
    return Identity(
        model=fingerprint(split, salt),
        cache_type_k=plan.config.k_type.name,
        cache_type_v=plan.config.v_type.name,
        k_rotation=options.k_rotation,
        v_rotation=options.v_rotation,
        n_layers=params.n_layers,
        n_kv_heads=params.n_kv_heads,
        head_dim=params.head_dim,
    )


def fingerprint(split: ModelSplit, salt: bytes = b"") -> str:
    """A hash of the parameters, of the ropes (they may depend on the context size) and of samples of all weights."""
    state = blake2b(digest_size=32)
    state.update(repr(split.params).encode() + salt)
    for node in split.split(BatchShape(1, 1)).graph.nodes:
        if isinstance(node.op, Rope):
            sources = [t.op.source for t in node.inputs if isinstance(t.op, Weight)]
            state.update(repr((node.op, sources)).encode())
    for name, info in sorted(split.spec.tensors.items()):
        state.update(repr((name, info.shape, info.format.name)).encode())
        data = split.spec.tensor(name).data.flatten()
        for sample in (data[:_SAMPLE_BYTES], data[-_SAMPLE_BYTES:]):
            state.update(sample.numpy().tobytes())
    return state.hexdigest()
