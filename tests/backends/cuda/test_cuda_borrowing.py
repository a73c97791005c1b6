"""Experts that are copied for one batch: in time, whole, and into memory that layers share."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.borrowing import Borrowing, borrowed_bytes, page_ranges
from motley.backends.cuda.kernels.repack import repack
from motley.backends.cuda.planes import WeightPlanes, to_planes
from motley.backends.cuda.values import Values
from motley.errors import PlanError
from motley.formats import PackedTensor, get_format
from motley.graph.ops import Weight

N_EXPERTS, N_ROWS, N_COLUMNS = 3, 4, 256
CPU = torch.device("cpu")


def experts(seed: int, form: str = "Q4_K") -> PackedTensor:
    values = torch.randn(N_EXPERTS, N_ROWS, N_COLUMNS, generator=torch.Generator().manual_seed(seed))
    return PackedTensor.pack(values, get_format(form))


def parts(planes: WeightPlanes) -> list[torch.Tensor]:
    return [part.clone() for part in (planes.codes, planes.scale, planes.high) if part is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def whole(source: PackedTensor) -> list[torch.Tensor]:
    return parts(to_planes(PackedTensor(source.data.flatten(0, 1), source.format)))


@pytest.mark.parametrize("n_sets", [2, 4])
@pytest.mark.parametrize("n_stages", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("portion", [1, 300, 1 << 20])
def test_a_stage_finds_its_matrices_whatever_was_there_before(
    monkeypatch: pytest.MonkeyPatch, n_stages: int, portion: int, n_sets: int
) -> None:
    monkeypatch.setattr("motley.backends.cuda.borrowing._PORTION", portion)
    borrowing, seen = Borrowing(CPU, n_sets), cast(list[tuple[str, list[torch.Tensor]]], [])
    stages = [[f"blk.{i}.up", f"blk.{i}.down"] for i in range(n_stages)]
    sources = {
        name: experts(10 * i + j, "Q4_K" if j else "Q6_K")
        for i, names in enumerate(stages)
        for j, name in enumerate(names)
    }
    for names in stages:
        borrowing.assign(names, [sources[name] for name in names])
    assert len({id(borrowing.planes(name)) for name in sources}) == 2 * min(n_sets, n_stages)

    def step_of(names: list[str]) -> Any:
        return lambda _: seen.extend((name, parts(borrowing.planes(name))) for name in names)

    steps = [borrowing.around(step_of(names), names, stages[i + 1 :]) for i, names in enumerate(stages)]
    for number, run in enumerate(steps * 3 + steps[:1]):
        if number % n_stages == 0:
            borrowing.begin(stages)
        run(Values({}))
    assert len(seen) == 2 * (3 * n_stages + 1)
    assert all(same(found, whole(sources[name])) for name, found in seen)


def test_a_copy_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    borrowing, source, seen = Borrowing(CPU), experts(1), cast(list[list[torch.Tensor]], [])
    borrowing.assign(["up"], [source])
    run = borrowing.around(lambda _: seen.append(parts(borrowing.planes("up"))), ["up"], [])
    copy = Borrowing._copy

    def fail(*_: object) -> None:
        raise PlanError("no memory")

    monkeypatch.setattr(Borrowing, "_copy", fail)
    with pytest.raises(PlanError):
        run(Values({}))
    monkeypatch.setattr(Borrowing, "_copy", copy)
    run(Values({}))
    assert same(seen[0], whole(source))


def test_the_memory_of_the_sets_is_free_as_soon_as_the_model_is_closed() -> None:
    """Nothing of it waits for the garbage collector: the next model may need the GPU's memory."""
    borrowing = Borrowing(CPU)
    borrowing.assign(["up"], [experts(1)])
    codes = weakref.ref(borrowing.planes("up").codes)
    gc.disable()
    try:
        del borrowing
        assert codes() is None
    finally:
        gc.enable()


def test_pages_that_neighbours_share_are_in_one_range() -> None:
    page = mmap.PAGESIZE
    memory = torch.zeros(20 * page, dtype=torch.uint8)
    base = -(-memory.data_ptr() // page) * page - memory.data_ptr()
    ends = [(3 * page + 5, 5 * page), (0, page + 5), (page + 10, 2 * page), (9 * page + 1, 9 * page + 2)]
    found = page_ranges([memory[base + start : base + stop] for start, stop in ends])
    first = memory.data_ptr() + base
    assert [((a - first) // page, (b - first) // page) for a, b in found] == [(0, 2), (3, 5), (9, 10)]


def test_memory_for_the_sets_is_counted() -> None:
    def weights(n_layers: int) -> list[Any]:
        return [
            Weight((2, 4, 256), "Q4_K", f"blk.{i}.ffn_{name}_exps.weight")(
                name=f"blk.{i}.ffn_{name}_exps.weight"
            )
            for i in range(n_layers)
            for name in ("gate", "up", "down")
        ]

    assert borrowed_bytes([], 2) == 0
    assert borrowed_bytes(weights(2), 2) == borrowed_bytes(weights(9), 2) > 2 * 3 * (2 * 4 * 256 // 32) * 20
    assert borrowed_bytes(weights(9), 5) > borrowed_bytes(weights(9), 2)


@pytest.mark.parametrize(("n_rows", "n_columns"), [(1, 256), (3, 512), (40, 768)])
def test_repacking_in_one_pass_makes_the_same_planes(n_rows: int, n_columns: int) -> None:
    values = torch.randn(n_rows, n_columns, generator=torch.Generator().manual_seed(n_rows)) * 100
    packed = PackedTensor.pack(values, get_format("Q4_K"))
    blocks = packed.data.view(-1, 144)
    blocks[0] = torch.arange(144, dtype=torch.uint8) + 100  # any bits, and scales beyond float16
    blocks[0, :4] = torch.tensor([0xFF, 0x7B, 0xFF, 0xFB], dtype=torch.uint8)
    expected = to_planes(packed)
    assert expected.scale is not None
    found = WeightPlanes(
        "Q4_K", n_columns, torch.empty_like(expected.codes), torch.empty_like(expected.scale)
    )
    repack(packed.data, found)
    assert same(parts(found), parts(expected))
