"""When a GPU computes with the CPU's experts: by the number of rows alone, where both devices can."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest

from motley.backends import Backend, ReferenceBackend
from motley.bundled import bundled_experts_path
from motley.errors import ConfigError, DeviceError
from motley.formats import PackedTensor
from motley.gguf import read_spec
from motley.graph import CACHE, Tensor
from motley.graph.ops import ExpertFfn, Weight
from motley.graph.roles import EXPERTS
from motley.models import BatchShape, GraphOptions, read_params
from motley.runtime import Crew, ModelSplit, lending, make_crew
from motley.runtime.budget import device_needs
from motley.runtime.crossover import MIN_ROWS
from motley.runtime.lending import lent_weights, settle_lending
from motley.runtime.worker import Worker

FEW, MANY = BatchShape(MIN_ROWS - 1, 1), BatchShape(MIN_ROWS, 1)


@pytest.fixture(autouse=True)
def borrow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOTLEY_BORROW_ROWS", raising=False)


class Borrower(ReferenceBackend):
    def can_borrow(self, weight: Tensor) -> bool:
        return True

    def borrowed_bytes(self, graph: object, resident: object, n_ahead: int) -> int:
        return 1000


def split_of(crew: Crew) -> ModelSplit:
    spec = read_spec(bundled_experts_path())
    return ModelSplit(spec, read_params(spec), crew, GraphOptions(32))


def settled(backends: list[Backend] | None = None, **options: Any) -> Crew:
    crew = make_crew(**({"devices": "cpu,cpu", "n_cpu_moe": 4} | options))
    return settle_lending(crew, backends or [Borrower(), ReferenceBackend()], lambda: split_of(crew))


def n_experts(split: ModelSplit, device: int, shape: BatchShape) -> int:
    weights = split.share(device, shape).graph.weights
    return sum(isinstance(t.op, Weight) and t.op.role.group == EXPERTS for t in weights)


def test_many_rows_are_computed_where_the_rest_of_the_layer_is() -> None:
    split = split_of(settled())
    assert [n_experts(split, device, FEW) for device in range(2)] == [3 * 2, 3 * 4]
    assert [n_experts(split, device, MANY) for device in range(2)] == [3 * 6, 0]
    assert [n_experts(split, device, BatchShape(1, 1)) for device in range(2)] == [3 * 2, 3 * 4]
    assert [t.kind for t in split.split(MANY).collectives] == ["broadcast"]  # of the logits
    assert [t.kind for t in split.split(FEW).collectives].count("send") == 8
    ffns = [node for node in split.share(0, MANY).graph.nodes if isinstance(node.op, ExpertFfn)]
    assert len(ffns) == 6


def test_memory_is_that_of_own_weights_and_of_copies() -> None:
    backends: list[Backend] = [Borrower(), ReferenceBackend()]
    lent, kept = split_of(settled()), split_of(make_crew("cpu,cpu", n_cpu_moe=4))
    for shape, n_more in ((FEW, 0), (MANY, 1000)):
        with_copies, without = (device_needs(split, backends, shape) for split in (lent, kept))
        assert [need.weights for need in with_copies] == [need.weights for need in without]
        assert with_copies[0].workspace == without[0].workspace + n_more
        assert with_copies[1] == without[1]


@pytest.mark.parametrize(
    "options",
    [
        {"n_cpu_moe": 0},
        {"expert_split": (1, 1)},
        {"devices": "cpu,cpu,cpu"},  # two devices share the rest
        {"tensor_split": (0, 1), "expert_split": (0, 1)},
        {"backends": [ReferenceBackend(), ReferenceBackend()]},
    ],
    ids=lambda options: ",".join(options),
)
def test_other_crews_lend_nothing(options: dict[str, Any]) -> None:
    apart = settled(**options).apart
    assert apart is None or apart.borrower is None


def test_layers_without_experts_lend_nothing(shared: Path) -> None:
    """The first layer of GLM is dense."""
    spec = read_spec(shared / "golden" / "glm4moe" / "model.gguf")
    borrowers = []
    for n_layers in (1, 2):
        crew = make_crew("cpu,cpu", n_cpu_moe=n_layers)
        split = ModelSplit(spec, read_params(spec), crew, GraphOptions(32))
        apart = settle_lending(crew, [Borrower(), ReferenceBackend()], lambda split=split: split).apart  # type: ignore[misc]
        assert apart is not None
        borrowers.append(apart.borrower)
    assert borrowers == [None, 0]


def test_without_memory_for_the_files_pages_nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "host_bytes", lambda: 4 << 30)
    apart = settled().apart
    assert apart is not None
    assert apart.borrower is None
    monkeypatch.setattr(lending, "host_bytes", lambda: None)
    assert settled().apart != apart


def test_the_number_of_rows_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "7")
    apart = settled().apart
    assert apart is not None
    assert (apart.borrower, apart.min_rows) == (0, 7)
    assert apart.lent.shares == (Fraction(1), Fraction(0))
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "0")
    assert settled() == make_crew("cpu,cpu", n_cpu_moe=4)
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "many")
    with pytest.raises(ConfigError, match="'many'"):
        settled()


class Native(ReferenceBackend):
    has_native_collectives = True


def layered(backends: list[Backend] | None = None, **options: Any) -> Crew:
    crew = make_crew(**({"devices": "cpu,cpu", "split_mode": "layer", "tensor_split": (2, 1)} | options))
    return settle_lending(crew, backends or [Borrower(), Native()], lambda: split_of(crew))


def test_by_layers_many_rows_are_multiplied_on_the_borrower_and_attend_on_the_owner() -> None:
    split = split_of(layered())
    few, many = ([split.share(device, shape).graph for device in range(2)] for shape in (FEW, MANY))
    assert [sum(len(w.shape) > 1 for w in graph.weights) > 9 for graph in (*few, *many)] == [True] * 3 + [
        False
    ]
    layers = [[node.name for node in graph.inputs if node.dtype == CACHE] for graph in (*few, *many)]
    assert layers[:2] == layers[2:]  # the cache stays where it is
    assert "positions" in {node.name for node in many[1].inputs}
    n_owned = len(layers[1])
    assert [t.kind for t in split.split(MANY).collectives].count("send") in (4 * n_owned, 4 * n_owned + 1)
    own = {node.name for node in few[0].weights}
    assert {n.name for n in split.lent_share(0).graph.weights} - own == {
        n.name for n in many[0].weights
    } - own


@pytest.mark.parametrize(
    "options",
    [
        {"split_mode": "tensor"},
        {"tensor_split": (1, 0)},
        {"devices": "cpu,cpu,cpu", "tensor_split": (1, 1, 1)},
        {"backends": [Native(), Native()]},
        {"backends": [ReferenceBackend(), Native()]},  # cannot borrow
    ],
    ids=lambda options: ",".join(options),
)
def test_other_crews_lend_no_layers(options: dict[str, Any]) -> None:
    assert layered(**options).borrower is None


def test_if_the_system_refuses_to_pin_pages_the_cpu_computes_all_batches() -> None:
    split = split_of(settled())
    assert split.is_lent(MANY)
    assert lent_weights(split, 1, Borrower(), ()) == {}
    assert split.is_lent(MANY)  # another device does not borrow
    own = [node.name for node in split.share(0, FEW).graph.weights]
    assert lent_weights(split, 0, Borrower(), own) == {}  # Backend.borrow refuses
    assert not split.is_lent(MANY)
    assert [n_experts(split, device, MANY) for device in range(2)] == [3 * 2, 3 * 4]


def test_what_a_device_borrows_is_all_that_it_lacks() -> None:
    class Lender(Borrower):
        def borrow(self, weights: Mapping[str, PackedTensor], n_ahead: int) -> Mapping[str, PackedTensor]:
            return dict(weights)

    split = split_of(settled())
    own = [node.name for node in split.share(0, FEW).graph.weights]
    lent = lent_weights(split, 0, Lender(), own)
    assert sorted([*own, *lent]) == sorted(node.name for node in split.share(0, MANY).graph.weights)
    for name, weight in lent.items():
        assert weight.unpack().equal(split.spec.tensor(name).unpack())


def test_after_a_failure_nothing_is_lent_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's part of it: its plans with borrowed experts are forgotten."""
    split = split_of(settled())
    worker = object.__new__(Worker)
    worker._split = split
    worker._link = None
    worker._rendezvous = None
    steps = OrderedDict.fromkeys([FEW, MANY], cast(Any, None))
    worker._steps = steps

    def fail(*_: object) -> None:
        raise DeviceError("no more memory")

    monkeypatch.setattr(Worker, "_run", fail)
    monkeypatch.setattr(Worker, "prepare", lambda self, shape: None)
    for shape, left in ((FEW, [FEW, MANY]), (MANY, [FEW])):
        with pytest.raises(DeviceError, match="no more memory"):
            worker.run(shape, cast(Any, None), {}, ())
        assert list(steps) == left
    assert not split.is_lent(MANY)
