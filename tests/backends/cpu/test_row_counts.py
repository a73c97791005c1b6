"""Plans for more rows than a batch has: the same results, and nothing computed for the rows that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from motley import LLM
from motley.backends import Executable
from motley.backends.cpu import CpuBackend, is_available
from motley.backends.cpu.row_counts import OUTPUTS, TOKENS, Rows, rows_of_tensors
from motley.gguf import read_spec
from motley.graph import CACHE, F32, I32, Graph
from motley.graph.ops import Add, GetRows, Input, MatMul, Permute, Reshape, Slice, Weight
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.ownership import Word
from motley.runtime import splitting
from motley.split import apart
from motley.split.collectives import ReduceScatter

if not is_available():
    pytest.skip("the native module is not built", allow_module_level=True)

CREWS = {
    "one device": {},
    "tensor": {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
    "a device without heads": {"devices": "cpu,cpu,cpu", "split_mode": "tensor", "tensor_split": (9, 0, 1)},
    "layer": {"devices": "cpu,cpu,cpu", "split_mode": "layer"},
}
EXPERTS = ["glm4moe", "gpt-oss", "qwen3moe", "qwen3vlmoe"]


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Path:
    """A file by the name of its fixture, or of its folder of golden logits."""
    name: str = request.param
    if name in EXPERTS:
        path: Path = request.getfixturevalue("shared") / "golden" / name / "model.gguf"
    else:
        path = request.getfixturevalue(name)
    return path


@pytest.mark.parametrize("model", ["bundled", "random_gemma3", "glm4moe", "gpt-oss"], indirect=True)
@pytest.mark.parametrize("crew", CREWS)
def test_batches_of_a_bucket_give_what_plans_of_their_own_would(
    model: Path, crew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [16, 11, 9, 1, 3, 20, 5]  # some after larger ones, whose values still lie in memory

    def all_logits() -> list[torch.Tensor]:
        with LLM(model, n_ctx=256, n_parallel=1, **CREWS[crew]) as llm, llm.raw_sequence() as sequence:
            return [sequence.feed([7 * i + n for i in range(n)], n_outputs=2) for n in sizes]

    padded = all_logits()
    monkeypatch.setattr(CpuBackend, "bucket", lambda self, n_rows: n_rows)
    for ours, exact in zip(padded, all_logits(), strict=True):
        assert torch.equal(ours, exact)


def test_a_changing_number_of_requests_makes_few_plans(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Executable] = []
    prepare = CpuBackend.prepare

    def counted(*args: Any) -> Executable:
        made.append(prepare(*args))
        return made[-1]

    monkeypatch.setattr(CpuBackend, "prepare", counted)
    with LLM(bundled, n_ctx=1024, n_parallel=16) as llm:
        for n in range(1, 17):
            llm.generate([[5]] * n, max_tokens=2, temperature=0)
    assert len(made) == 2  # one row, and up to 16


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma3", *EXPERTS])
def test_all_activations_of_a_model_are_by_rows(shared: Path, name: str) -> None:
    spec = read_spec(shared / "golden" / name / "model.gguf")
    graph = build_graph(
        spec, read_params(spec), BatchShape(8, 4), GraphOptions(n_ctx=256, k_rotation=16, v_rotation=16)
    )
    known = rows_of_tensors(graph)
    computed = [t for t in graph.nodes if t.inputs and t.dtype != CACHE]
    assert computed
    assert [t for t in computed if t not in known and not t.op.is_constant] == []
    assert known[graph.outputs[0]] == Rows(OUTPUTS, 4)


def test_what_moves_rows_about_is_not_by_rows() -> None:
    tokens = Input((6,), I32)(name="tokens")
    x = GetRows()(Weight((10, 8), "F32")(name="table"), tokens)
    turned = Permute((1, 0))(x)
    cut = Slice(0, 1, 4)(x)
    mixed = Add()(x, Input((6, 8), F32)(name="other"))
    product = MatMul()(Reshape((6, 8))(x), x)  # of rows with rows
    known = rows_of_tensors(Graph.of(turned, cut, mixed, product))
    assert known[x] == Rows(TOKENS, 6)
    assert not {turned, cut, mixed, product} & set(known)


def test_a_sum_that_one_device_needs_alone_is_by_rows() -> None:
    x = GetRows()(Weight((10, 8), "F32")(name="table"), Input((6,), I32)(name="tokens"))
    whole, parts = (ReduceScatter(0, word, 0)(x) for word in (Word.of(0, 6), Word.run((4, 2))))
    known = rows_of_tensors(Graph.of(whole, parts))
    assert known[whole] == Rows(TOKENS, 6)
    assert parts not in known


def shared_expert_apart(shared: Path, backend: str) -> tuple[LLM, LLM]:
    """A model on one device, and on two: the first has a shared expert alone, the second one its gate."""
    (path,) = (shared / "golden" / "qwen3next").glob("model-*.gguf")
    options: dict[str, Any] = {"backend": backend, "n_ctx": 64, "n_parallel": 1}
    crew: dict[str, Any] = {
        "devices": "cpu,cpu",
        "split_mode": "tensor",
        "tensor_split": (1, 10),
        "split_experts": "ffn",
        "n_cpu_moe": 1,
    }
    return LLM(path, **options), LLM(path, **options, **crew)


def n_single_sums(llm: LLM) -> int:
    share = llm._loaded.split.share(0, BatchShape(1, 1))
    return sum(isinstance(node.op, ReduceScatter) for node in share.graph.nodes)


@pytest.mark.parametrize("backend", ["cpu", "cpu-exact"])
def test_sums_of_single_devices_are_computed_for_any_number_of_rows(
    shared: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what `apart` and `residual` demand: sums go to single devices."""
    monkeypatch.setattr(apart, "_owners_of_shared", lambda *_: {})
    monkeypatch.setattr(splitting, "residual_demands", lambda *_: {})
    one, two = shared_expert_apart(shared, backend)
    with one, two:
        assert n_single_sums(two)
        for n in (1, 9):
            difference = one.logits(range(3, 3 + n)) - two.logits(range(3, 3 + n))
            assert abs(difference).max() < 0.05


def test_a_shared_expert_apart_from_its_gate_computes_any_number_of_rows(shared: Path) -> None:
    one, two = shared_expert_apart(shared, "cpu-exact")
    with one, two:
        assert not n_single_sums(two)
        for n in (1, 9):
            difference = one.logits(range(3, 3 + n)) - two.logits(range(3, 3 + n))
            assert abs(difference).max() < 1e-3


def test_rows_with_rounded_activations_do_not_depend_on_their_number(shared: Path) -> None:
    one, two = shared_expert_apart(shared, "cpu")
    with one, two:
        for llm in (one, two):
            assert (llm.logits(range(3, 12))[:1] == llm.logits([3])).all()


def test_rows_of_a_tensor_are_pieces_of_its_first_axis() -> None:
    rows = Rows(TOKENS, 4)
    assert rows.of(torch.zeros(4, 3), 2).shape == (2, 3)
    assert rows.of(torch.zeros(12, 3), 2).shape == (6, 3)
    assert rows.of(torch.zeros(1, 4, 3), 2).shape == (1, 4, 3)
