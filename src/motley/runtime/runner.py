"""`Runner`: model + cache + batch → logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from motley.backends import Backend
from motley.formats import PackedTensor
from motley.gguf import ModelSpec
from motley.graph import Tensor
from motley.graph.ops import Weight
from motley.kvcache.arena import Arena, LayerGroup
from motley.kvcache.batching import Extent, group_batches
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy
from motley.kvcache.types import CacheType
from motley.models import BatchShape, DecoderParams, build_graph
from motley.runtime.batch import Batch
from motley.runtime.device import DeviceBatch, DeviceRunner

Progress = Callable[[int, int], None]
"""Called while loading with (bytes done, bytes in all)."""


class Runner:
    """Loads a model onto a backend and runs batches through it."""

    def __init__(
        self,
        spec: ModelSpec,
        params: DecoderParams,
        backend: Backend,
        *,
        n_ctx: int,
        n_blocks: int,
        block_size: int,
        k_type: CacheType,
        v_type: CacheType,
        progress: Progress | None = None,
    ) -> None:
        smallest = build_graph(spec, params, BatchShape(1, 1), n_ctx)  # fails early, and names the weights
        weights = _load(spec, smallest.weights, backend, progress)
        layers = LayerGroup(tuple(range(params.n_layers)), (params.n_kv_heads,) * params.n_layers, n_blocks)
        arena = Arena(k_type, v_type, [layers], block_size=block_size, head_dim=params.head_dim)
        self._device = DeviceRunner(
            backend, weights, arena, lambda shape: build_graph(spec, params, shape, n_ctx)
        )

    def run(self, batch: Batch, manager: CacheManager, copies: Iterable[BlockCopy]) -> torch.Tensor:
        """Logits (outputs, vocab) of the rows that want them. Slots have been reserved; `copies` are made first."""
        self._device.arena.copy(copies)
        extents = [Extent(c.sequence, c.start, len(c.tokens)) for c in batch.chunks]
        inputs = {"tokens": batch.tokens(), "positions": batch.positions(), "output_rows": batch.output_rows()}
        return self._device.run(
            DeviceBatch(
                BatchShape(batch.n_tokens, batch.n_outputs),
                {name: torch.tensor(ids, dtype=torch.int32) for name, ids in inputs.items()},
                tuple(group_batches(manager, extents)),
            )
        )

    def memory(self) -> dict[str, int]:
        """Bytes by purpose."""
        device = self._device
        return {
            "weights": device.n_weight_bytes,
            "kv_cache": device.arena.n_bytes,
            "activations": device.n_activation_bytes,
        }


def _load(spec: ModelSpec, nodes: Sequence[Tensor], backend: Backend, progress: Progress | None) -> dict[str, PackedTensor]:
    """The weights by name; those with the same source share memory."""
    sources = dict.fromkeys(node.op.source for node in nodes if isinstance(node.op, Weight))
    total, done, loaded = sum(spec.tensors[source].nbytes for source in sources), 0, {}
    for source in sources:
        loaded[source] = backend.load(spec.tensor(source))
        done += loaded[source].nbytes
        if progress is not None:
            progress(done, total)
    return {node.name: loaded[node.op.source] for node in nodes if isinstance(node.op, Weight)}
