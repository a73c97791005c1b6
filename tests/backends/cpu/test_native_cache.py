"""The cache's bytes and the attention over them, for every type and every pair of types."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ReferenceBackend, run_graph

from motley.graph import CACHE, Graph, Tensor
from motley.graph.ops import Attention, CacheStore, Hadamard, Input, MatMul, Reshape
from motley.kvcache.arena import ArenaLayer, GroupBatch, SequenceTable
from motley.kvcache.store import Store
from motley.kvcache.types import CACHE_TYPES

QUANTIZED = [name for name, kind in CACHE_TYPES.items() if kind.is_quantized]


def store(kind: str, block_size: int, n_rows: int, dim: int) -> Store:
    return Store(CACHE_TYPES[kind], n_blocks=48, block_size=block_size, n_rows=n_rows, head_dim=dim)


class Case:
    """Sequences with some context in a cache of two layers, and a batch that goes on with each of them."""

    def __init__(
        self,
        k_type: str,
        v_type: str,
        *,
        contexts: tuple[int, ...] = (70,),
        n_new: tuple[int, ...] = (3,),
        block_size: int = 16,
        heads: tuple[int, int] = (4, 2),
        dim: int = 64,
        first: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(contexts) + dim)
        self.n_heads, self.n_kv, self.dim = *heads, dim
        self.keys, self.values = (store(kind, block_size, 2 * self.n_kv, dim) for kind in (k_type, v_type))
        self.rows = slice(self.n_kv, 2 * self.n_kv)  # the second layer
        free = torch.randperm(48, generator=generator).tolist()
        tables, row = [], 0
        for context, new in zip(contexts, n_new, strict=True):
            total = context + new
            blocks = np.array([free.pop() for _ in range(-(-total // block_size))], np.int32)
            table = SequenceTable(row, new, first + context, first, blocks)
            own = table.slots(block_size)
            past = torch.randn(2, context, self.n_kv, dim, generator=generator) * 2
            self.keys.write(self.rows, own[:context], past[0])
            self.values.write(self.rows, own[:context], past[1])
            tables.append(table)
            row += new
        self.batch = GroupBatch.of(tables, block_size)
        self.n_tokens = row
        self.inputs = {
            "q": torch.randn(row, self.n_heads, dim, generator=generator),
            "k": torch.randn(row, self.n_kv, dim, generator=generator),
            "v": torch.randn(row, self.n_kv, dim, generator=generator),
            "cache.0": ArenaLayer(self.keys, self.values, self.rows, 0).on(self.batch),
        }

    def graph(self, *, window: int | None = None, rotation: int = 0) -> Graph:
        def turn(x: Tensor) -> Tensor:
            if not rotation:
                return x
            rows = Reshape((x.n_values // rotation, rotation))(x)
            return Reshape(x.shape)(MatMul()(rows, hadamard))

        hadamard = Hadamard(rotation or 32)()
        q = Input((self.n_tokens, self.n_heads, self.dim), "f32")(name="q")
        k, v = (Input((self.n_tokens, self.n_kv, self.dim), "f32")(name=name) for name in "kv")
        cache = Input((self.n_kv, self.dim), CACHE)(name="cache.0")
        stored = CacheStore()(cache, turn(k), turn(v))
        return Graph.of(turn(Attention(self.dim**-0.5, window)(turn(q), stored)))

    def run(self, backend: object, **options: int | None) -> torch.Tensor:
        return run_graph(backend, self.graph(**options), self.inputs, {})[0]  # type: ignore[arg-type]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


def allowed(k_type: str) -> float:
    """Queries are quantized to 8 bits where keys are."""
    return 0.02 if k_type in QUANTIZED else 1e-5


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("k_type", "v_type"), list(itertools.product(CACHE_TYPES, CACHE_TYPES)))
def test_attention_over_every_pair_of_types(k_type: str, v_type: str, instruction_set: str) -> None:
    if instruction_set != INSTRUCTION_SETS[0] and k_type != v_type:
        return  # types are read apart: equal pairs have them all
    case = Case(k_type, v_type)
    expected = case.run(ReferenceBackend())
    assert relative_error(case.run(CpuBackend(instruction_set)), expected) < allowed(k_type)


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize("block_size", [16, 5])
def test_what_is_stored_has_the_references_bytes(kind: str, block_size: int) -> None:
    stores = []
    for backend in (ReferenceBackend(), CpuBackend()):
        case = Case(kind, kind, contexts=(0,), n_new=(11,), block_size=block_size, dim=80)
        case.inputs["k"][2, 0, :32] = 0.0
        case.inputs["k"][3, 1, 40] = torch.nan
        case.inputs["v"][4, 0, 7] = -torch.inf
        case.inputs["v"][5] *= 1e-9
        case.inputs["v"][6] *= 1e9
        case.run(backend)
        stores += [case.keys, case.values]
    for expected, stored in ((stores[0], stores[2]), (stores[1], stores[3])):
        for name, plane in expected.planes.items():
            a, b = plane.flatten(), stored.planes[name].flatten()
            differs = (
                a.view(torch.uint8) != b.view(torch.uint8)
                if not a.is_floating_point()
                else ~torch.isclose(a.float(), b.float(), rtol=2e-3, atol=0, equal_nan=True)
            )
            assert differs.float().mean() <= 1e-3, f"{name}: {int(differs.sum())} of {differs.numel()}"


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("window", [None, 1, 20, 64, 1000])
def test_windows(kind: str, window: int | None) -> None:
    case = Case(kind, kind, contexts=(150,), n_new=(20,))
    expected = case.run(ReferenceBackend(), window=window)
    assert relative_error(case.run(CpuBackend(), window=window), expected) < allowed(kind)


@pytest.mark.parametrize("kind", ["f32", "bf16", "q5_1", "iq4_nl"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 32, 64])
def test_blocks_of_any_size(kind: str, block_size: int) -> None:
    context = min(70, 30 * block_size)
    case = Case(kind, kind, contexts=(context,), n_new=(2,), block_size=block_size)
    assert relative_error(case.run(CpuBackend()), case.run(ReferenceBackend())) < allowed(kind)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("dim", [32, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)])
def test_heads_of_any_shape(kind: str, dim: int, heads: tuple[int, int]) -> None:
    case = Case(kind, kind, heads=heads, dim=dim)
    assert relative_error(case.run(CpuBackend()), case.run(ReferenceBackend())) < allowed(kind)


@pytest.mark.parametrize("kind", ["f16", "q4_1"])
def test_sequences_side_by_side(kind: str) -> None:
    case = Case(kind, kind, contexts=(0, 130, 17), n_new=(5, 1, 30))
    assert relative_error(case.run(CpuBackend()), case.run(ReferenceBackend())) < allowed(kind)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_new", [1, 2])
def test_long_contexts_are_split_over_threads(n_threads: int, n_new: int) -> None:
    case = Case("q8_0", "f16", contexts=(1200,), n_new=(n_new,), block_size=32, heads=(2, 1))
    expected, before = case.run(ReferenceBackend()), torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        assert relative_error(case.run(CpuBackend()), expected) < allowed("q8_0")
    finally:
        torch.set_num_threads(before)


def test_contexts_that_lost_their_beginning() -> None:
    case = Case("f16", "f16", contexts=(50,), first=32)
    assert relative_error(case.run(CpuBackend(), window=40), case.run(ReferenceBackend(), window=40)) < 1e-5


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_rotations_are_folded_into_the_kernels(kind: str) -> None:
    case = Case(kind, kind)
    expected = case.run(ReferenceBackend(), rotation=64)
    assert relative_error(case.run(CpuBackend(), rotation=64), expected) < allowed(kind)


def test_a_device_without_heads_does_nothing() -> None:
    case = Case("f16", "f16", heads=(0, 0))
    assert case.run(CpuBackend()).shape == (3, 0, 64)
