"""Reads and writes the K/V of a layer with all heads in the model's order, independent of the split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import torch

from motley.graph import RECURRENT, Tensor
from motley.graph.ops import CacheStore, Rope, Weight, cache_layer, state_of
from motley.kvcache.session_file import Identity
from motley.kvcache.state_arena import STATE_TYPES
from motley.kvcache.types import TILE, CacheType
from motley.models import BatchShape
from motley.ownership import Split, State, Word
from motley.runtime.caching import CachePlan
from motley.runtime.splitting import ModelSplit
from motley.split.collectives import put, take
from motley.split.infer import SplitGraph

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
        self._parts = parts
        self._n_devices = len(split.crew)
        self._n_heads = split.params.n_kv_heads
        self._head_dim = plan.head_dim
        self._kinds = plan.config.k_type, plan.config.v_type
        self._state_dtype = STATE_TYPES[plan.config.state_type]
        self._repeats: dict[int, int] = {}  # by layer: copies of each KV head
        self._words: dict[
            int, Word | None
        ] = {}  # by layer: which device has which heads; None: every device has all
        self._states: dict[int, list[tuple[Tensor, State]]] = {}  # by layer: inputs, and how they are split
        for group in range(split.n_groups):
            self._add(split.split(BatchShape(1, 1), group), split.kv_repeat(group))

    def _add(self, whole: SplitGraph, kv_repeat: int) -> None:
        """Adds the layers of a group of devices."""
        for node in whole.graph.nodes:
            if isinstance(node.op, CacheStore):
                state = whole.ways[node].inputs[0]
                layer = cache_layer(node.inputs[0])
                self._words[layer] = state.word if isinstance(state, Split) else None
                self._repeats[layer] = kv_repeat
        for node in whole.graph.nodes:
            for tensor, state in zip(node.inputs, whole.ways[node].inputs, strict=True):
                if tensor.dtype == RECURRENT:
                    self._states.setdefault(state_of(tensor).layer, []).append((tensor, state))

    def read(self, layer: int, slots: Sequence[int]) -> list[Planes]:
        """The planes of K and of V, with each KV head once. Of a layer with a state: its parts, from its slot."""
        if layer in self._states:
            return self._read_states(layer, torch.tensor(slots))
        repeat = self._repeats[layer]
        whole = [self._empty(kind, len(slots), self._n_heads * repeat) for kind in self._kinds]
        for device, own in enumerate(self._parts.gather(layer, torch.tensor(slots))):
            for part, planes in zip(own, whole, strict=True):
                for name, items in part.items():
                    self._put(planes[name], items, layer, device)
        return [{name: items[:, ::repeat] for name, items in planes.items()} for planes in whole]

    def write(self, layer: int, slots: Sequence[int], planes: Sequence[Planes]) -> None:
        """Stores planes as `read` returns them; a repeated head is stored on each device that has it."""
        if layer in self._states:
            self._write_states(layer, torch.tensor(slots), planes)
            return
        whole = [
            {name: items.repeat_interleave(self._repeats[layer], 1) for name, items in part.items()}
            for part in planes
        ]
        parts = [
            [{name: self._take(items, layer, device) for name, items in part.items()} for part in whole]
            for device in range(self._n_devices)
        ]
        self._parts.scatter(layer, torch.tensor(slots), parts)

    def part_sizes(
        self, layer: int, n_tokens: int
    ) -> Iterator[list[tuple[str, tuple[int, ...], torch.dtype]]]:
        """Name, shape and type of each plane of `n_tokens` tokens: first those of K, then those of V."""
        if layer in self._states:
            for tensor, _ in self._states[layer]:
                yield [(tensor.name, tensor.shape, self._state_dtype)]
            return
        for kind in self._kinds:
            empty = self._empty(kind, n_tokens, self._n_heads)
            yield [(name, tuple(items.shape), items.dtype) for name, items in empty.items()]

    def _read_states(self, layer: int, slots: torch.Tensor) -> list[Planes]:
        """Each part of the layer's state, with all heads."""
        states = {tensor.name: state for tensor, state in self._states[layer]}
        whole = {t.name: torch.empty(t.shape, dtype=self._state_dtype) for t, _ in self._states[layer]}
        for device, own in enumerate(self._parts.gather(layer, slots)):
            for name, part in (item for planes in own for item in planes.items()):
                state = states[name]
                if isinstance(state, Split):
                    put(whole[name], part, state.axis, state.word, device)
                else:
                    whole[name].copy_(part)
        return [{name: part} for name, part in whole.items()]

    def _write_states(self, layer: int, slots: torch.Tensor, planes: Sequence[Planes]) -> None:
        def part(whole: torch.Tensor, state: State, device: int) -> torch.Tensor:
            return take(whole, state.axis, state.word, device) if isinstance(state, Split) else whole

        own = list(zip(self._states[layer], planes, strict=True))
        parts = [
            [{t.name: part(plane[t.name], state, device)} for (t, state), plane in own]
            for device in range(self._n_devices)
        ]
        self._parts.scatter(layer, slots, parts)

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
        model=fingerprint(split, salt + (plan.config.state_type.encode() if split.params.delta else b"")),
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
    for node in split.graph(BatchShape(1, 1)).nodes:
        if isinstance(node.op, Rope):
            sources = [t.op.source for t in node.inputs if isinstance(t.op, Weight)]
            state.update(repr((node.op, sources)).encode())
    for name, info in sorted(split.spec.tensors.items()):
        state.update(repr((name, info.shape, info.format.name)).encode())
        data = split.spec.tensor(name).data.flatten()
        for sample in (data[:_SAMPLE_BYTES], data[-_SAMPLE_BYTES:]):
            state.update(sample.numpy().tobytes())
    return state.hexdigest()
