"""Routed experts on other devices than the rest of their layers: the same answers, two hand-overs a layer."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from motley import LLM
from motley.bundled import bundled_experts_path, bundled_model_path
from motley.errors import ConfigError, DeviceError
from motley.gguf import read_spec
from motley.graph import CACHE
from motley.graph.ops import Weight
from motley.graph.roles import EXPERTS
from motley.models import BatchShape, GraphOptions, read_params
from motley.ownership import sole_owner
from motley.runtime import ModelSplit, crew, make_crew
from motley.runtime.explain import explain
from motley.runtime.loading import weight_bytes

TOKENS = [5, 91, 230, 17, 64, 3, 128, 77, 9, 201, 44, 18, 6, 150, 33, 71]
N_LAYERS = 6  # of the bundled model
# Options, and the collectives of one token beside that of the logits.
CREWS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"devices": "cpu,cpu", "n_cpu_moe": 6}, {"send": 12}),
    ({"devices": "cpu,cpu", "n_cpu_moe": 99}, {"send": 12}),
    ({"devices": "cpu,cpu", "n_cpu_moe": 2}, {"send": 4}),
    ({"devices": "cpu,cpu", "n_cpu_moe": 3, "tensor_split": (0, 1), "expert_split": (1, 0)}, {"send": 6}),
    ({"devices": "cpu,cpu", "n_cpu_moe": 6, "expert_split": (1, 3)}, {"broadcast": 6, "all_reduce": 6}),
    ({"devices": "cpu,cpu", "n_cpu_moe": 1, "expert_split": "1,1"}, {"broadcast": 1, "all_reduce": 1}),
    # Shares of less than one expert of a layer: one device has all of them, and the router.
    ({"devices": "cpu,cpu", "n_cpu_moe": 2, "expert_split": (1, 99)}, {"send": 4}),
    ({"devices": "cpu,cpu", "expert_split": (1, 30)}, {"send": 6, "broadcast": 3, "all_reduce": 3}),
    ({"devices": "cpu,cpu,cpu", "n_cpu_moe": 4}, {"all_reduce": 12}),
    ({"devices": "cpu,cpu,cpu", "n_cpu_moe": 6, "expert_split": (1, 1, 2)}, {"all_reduce": 12}),
    # One more between layers: three of them are on the first device, three on the second.
    ({"devices": "cpu,cpu,cpu", "n_cpu_moe": 6, "split_mode": "layer"}, {"send": 13}),
]


def name_of(options: object) -> str:
    return " ".join(map(str, options.values())) if isinstance(options, dict) else ""


def logits_of(path: Path, backend: str, **options: Any) -> npt.NDArray[np.float32]:
    settings = {"n_ctx": 32, "n_parallel": 1, "cache_type_k": "f32", "cache_type_v": "f32"}
    with LLM(path, backend=backend, **settings, **options) as llm:
        return llm.logits(TOKENS)


@pytest.fixture(scope="module")
def alone() -> dict[str, npt.NDArray[np.float32]]:
    """The logits of one device, by backend."""
    return {name: logits_of(bundled_experts_path(), name) for name in ("reference", "cpu", "cpu-exact")}


@pytest.mark.parametrize(("options", "collectives"), CREWS, ids=name_of)
def test_logits_are_those_of_one_device(
    options: dict[str, Any], collectives: dict[str, int], alone: dict[str, npt.NDArray[np.float32]]
) -> None:
    del collectives
    for backend in ("reference", "cpu-exact"):
        logits = logits_of(bundled_experts_path(), backend, **options)
        assert np.abs(logits - alone[backend]).max() <= 1e-3
        assert logits.argmax(-1).tolist() == alone[backend].argmax(-1).tolist()


@pytest.mark.parametrize("shares", [(1, 99), (0, 1)])
def test_a_device_with_nothing_but_experts_computes_fewer_rows_than_its_plan_has(
    shares: tuple[int, int],
) -> None:
    """It got the ids of experts for rows that the batch did not have: any numbers."""
    options: dict[str, Any] = {"backend": "cpu-exact", "n_ctx": 32, "n_parallel": 1}
    crew: dict[str, Any] = {"devices": "cpu,cpu", "n_cpu_moe": 2, "expert_split": shares}
    with LLM(bundled_experts_path(), **options) as one, LLM(bundled_experts_path(), **options, **crew) as two:
        for n_tokens in (1, 3, 5, 13):
            np.testing.assert_array_equal(two.logits(TOKENS[:n_tokens]), one.logits(TOKENS[:n_tokens]))


def test_with_whole_tensors_handed_over_not_a_bit_changes(alone: dict[str, npt.NDArray[np.float32]]) -> None:
    """Also with activations of 8 bits: they are rounded in the same place."""
    logits = logits_of(bundled_experts_path(), "cpu", devices="cpu,cpu", n_cpu_moe=4)
    np.testing.assert_array_equal(logits, alone["cpu"])


def split_of(**options: Any) -> ModelSplit:
    spec = read_spec(bundled_experts_path())
    return ModelSplit(spec, read_params(spec), make_crew(**options), GraphOptions(32))


@pytest.mark.parametrize(("options", "collectives"), CREWS, ids=name_of)
def test_a_layer_has_no_more_than_two_hand_overs(
    options: dict[str, Any], collectives: dict[str, int]
) -> None:
    split = split_of(**options)
    found = split.split(BatchShape(1, 1)).collectives
    inside = [t for t in found if t.user is not None]  # without that of the logits
    assert Counter(t.kind for t in inside) == Counter(collectives)
    assert len(found) - len(inside) == 1


def test_attention_cache_and_output_are_on_one_device_and_experts_on_the_other() -> None:
    split = split_of(devices="cpu,cpu", n_cpu_moe=4)
    first, second = (split.share(device, BatchShape(1, 1)) for device in range(2))
    assert sum(t.shape[0] for t in first.graph.inputs if t.dtype == CACHE) == 2 * N_LAYERS
    assert not [t for t in second.graph.inputs if t.dtype == CACHE]
    apart = [t for t in second.graph.weights if isinstance(t.op, Weight) and t.op.role.group == EXPERTS]
    assert len(apart) == 3 * 4
    assert {t.name for t in second.graph.weights} - {t.name for t in apart} == {
        f"blk.{layer}.ffn_gate_inp.weight" for layer in range(4)
    }
    assert weight_bytes(first) + weight_bytes(second) == weight_bytes(
        ModelSplit(split.spec, split.params, make_crew("cpu"), GraphOptions(32)).share(0, BatchShape(1, 1))
    )


def test_experts_are_shared_in_the_proportion_that_was_asked_for() -> None:
    split = split_of(devices="cpu,cpu", expert_split=(3, 1))
    states = [split.placement.states[f"blk.{layer}.ffn_up_exps.weight"] for layer in range(N_LAYERS)]
    assert all(sole_owner(state) is None for state in states)
    counts = [state.word.counts(2) for state in states]  # type: ignore[union-attr]
    assert [sum(column) for column in zip(*counts, strict=True)] == [12 * N_LAYERS, 4 * N_LAYERS]
    assert all(sole_owner(split.placement.states[f"cache.{layer}"]) == 0 for layer in range(N_LAYERS))


@pytest.mark.parametrize("architecture", ["qwen3moe", "glm4moe", "gpt-oss", "qwen3next"])
@pytest.mark.parametrize(
    "options",
    [
        {"devices": "cpu,cpu"},
        {"devices": "cpu,cpu", "expert_split": (1, 1)},
        {"devices": "cpu,cpu,cpu", "split_mode": "layer", "expert_split": (0, 1, 1)},
        {"devices": "cpu,cpu,cpu"},
    ],
    ids=name_of,
)
def test_shared_experts_dense_layers_and_biases_are_no_obstacle(
    shared: Path, architecture: str, options: dict[str, Any]
) -> None:
    path = shared / "golden" / architecture / "model.gguf"
    expected = logits_of(path, "reference")
    n_layers = read_params(read_spec(path)).n_layers
    logits = logits_of(path, "reference", n_cpu_moe=n_layers, **options)
    assert np.abs(logits - expected).max() <= 1e-3
    spec = read_spec(path)
    split = ModelSplit(
        spec, read_params(spec), make_crew(n_cpu_moe=n_layers, **options), GraphOptions(len(TOKENS))
    )
    found = [t for t in split.split(BatchShape(1, 1)).collectives if t.user is not None]
    moves = 1 if options.get("split_mode") == "layer" else 0  # of the residual, to the next layer's device
    assert len(found) <= 2 * n_layers + moves


def test_requests_choose_experts_and_layers_as_on_one_device() -> None:
    effort = {"n_expert_used": 2, "n_layer_exit": 3}
    options = {"n_ctx": 32, "n_parallel": 2, "backend": "cpu"}
    with (
        LLM(bundled_experts_path(), **options) as one,  # type: ignore[arg-type]
        LLM(bundled_experts_path(), devices="cpu,cpu", n_cpu_moe=2, **options) as two,  # type: ignore[arg-type]
    ):
        np.testing.assert_array_equal(two.logits(TOKENS, **effort), one.logits(TOKENS, **effort))
        sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
        answers = [[a.tokens for a in llm.generate([TOKENS, TOKENS[:5]], **sampling)] for llm in (one, two)]
    assert answers[0] == answers[1]


# Automatic


def n_apart(llm: LLM) -> int:
    apart = llm._loaded.split.crew.apart
    assert apart is not None
    assert apart.n_layers is not None
    return apart.n_layers


def test_as_few_layers_as_possible_are_apart() -> None:
    options: dict[str, Any] = {
        "n_ctx": 64,
        "n_parallel": 1,
        "n_batch": 16,
        "devices": "cpu,cpu",
        "n_cpu_moe": "auto",
    }
    found = []
    for budget in ("64MiB", "9MiB", "7MiB", "5MiB"):
        with LLM(bundled_experts_path(), device_memory=(budget, "1GiB"), **options) as llm:
            found.append(n_apart(llm))
            used = llm.device_memory()["cpu#0"]
            limit = int(budget.removesuffix("MiB")) << 20
            assert sum(used.values()) <= limit
            said = [notice for notice in llm.notices if "routed experts" in notice]
            assert len(said) == (1 if found[-1] else 0)
        if found[-1]:  # one layer less would not have left room for the context
            fewer = options | {"n_cpu_moe": found[-1] - 1}
            try:
                with LLM(bundled_experts_path(), device_memory=(budget, "1GiB"), **fewer) as llm:
                    assert llm.kv_stats().n_blocks * 32 < 64
            except DeviceError as error:
                assert "cpu#0 needs" in str(error)  # noqa: PT017  either is right
    assert found[0] == 0
    assert found == sorted(found)
    assert found[-1] > found[1] > 0


def test_a_device_that_is_too_small_for_the_rest_is_refused_with_numbers() -> None:
    with pytest.raises(DeviceError, match=r"cpu#0 needs .* but may use 1\.0 MiB"):
        LLM(bundled_experts_path(), devices="cpu,cpu", n_cpu_moe="auto", device_memory=("1MiB", "1GiB"))


# What is asked for


def test_by_default_experts_are_on_the_cpus_beside_gpus_and_on_the_last_device_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "known_devices", lambda: ("cpu", "cuda:0", "cuda:1"))
    one, zero = Fraction(1), Fraction(0)
    for devices, shares, experts in (
        ("cuda:0,cpu", (one, zero), (zero, one)),
        ("cpu,cuda:0", (zero, one), (one, zero)),
        ("cuda:0,cuda:1,cpu", (one, one, zero), (zero, zero, one)),
        ("cuda:0,cpu,cpu", (one, zero, zero), (zero, one, one)),
        ("cuda:0,cuda:1", (one, zero), (zero, one)),
        ("cuda:0", (one, zero), (zero, one)),  # the CPU joins
    ):
        made = make_crew(devices, n_cpu_moe=3)
        assert made.apart is not None
        assert (made.mode, made.shares, made.apart.shares) == ("tensor", shares, experts)
    assert [device.name for device in make_crew("cuda:0", n_cpu_moe="auto").devices] == ["cuda:0", "cpu"]
    assert make_crew("cpu", n_cpu_moe=3).apart is None  # they are on the CPU anyway
    assert make_crew("cuda:0,cpu", n_cpu_moe=0).apart is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1"),
        ({"n_cpu_moe": "some"}, "n_cpu_moe is 'some'"),
        ({"n_cpu_moe": 1.5}, "n_cpu_moe is 1.5"),
        ({"n_cpu_moe": 2, "split_mode": "none"}, "split mode none"),
        ({"expert_split": "1,2,3"}, "expert split '1,2,3' has 3 numbers"),
        ({"expert_split": "0,0"}, "expert split '0,0' is not a proportion"),
        ({"expert_split": "a,b"}, "expert split 'a,b' is not a list of numbers"),
    ],
)
def test_impossible_wishes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(bundled_experts_path(), devices="cpu,cpu", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1"),
        ({"n_cpu_moe": "some"}, "n_cpu_moe is 'some'"),
        ({"expert_split": "1,2"}, "expert split '1,2' has 2 numbers, but the number of devices is 1"),
        ({"expert_split": "a"}, "expert split 'a' is not a list of numbers"),
    ],
)
def test_one_device_refuses_them_too(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_crew("cpu", **options)
    assert make_crew("cpu", n_cpu_moe=3, expert_split="1").apart is None


def test_a_dense_model_has_no_experts_to_place() -> None:
    with pytest.raises(ConfigError, match="the model has no experts"):
        LLM(bundled_model_path(), devices="cpu,cpu", n_cpu_moe=2)


def test_beside_a_gpu_the_cpu_has_all_threads_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "known_devices", lambda: ("cpu", "cuda:0"))
    assert make_crew("cuda:0,cpu").threads(16) == [1, 15]
    assert make_crew("cuda:0,cpu").threads(1) == [1, 1]
    assert make_crew("cuda:0,cuda:0").threads(16) == [8, 8]


def test_a_gpu_alone_reads_weights_with_few_threads_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "known_devices", lambda: ("cpu", "cuda:0"))
    for n_cores, expected in ((16, 8), (4, 4)):
        monkeypatch.setattr(crew.torch, "get_num_threads", lambda n=n_cores: n)
        assert make_crew("cuda:0").threads(None) == [expected]
    assert make_crew("cuda:0").threads(16) == [16]


def test_explain_says_where_experts_are() -> None:
    contents = explain(split_of(devices="cpu,cpu", n_cpu_moe=2))
    assert contents["experts_apart"] == "routed experts of the first 2 layers: on cpu#1"
    contents = explain(split_of(devices="cpu,cpu", expert_split="1,3"))
    assert contents["experts_apart"] == "routed experts of the first 6 layers: 25% on cpu#0, 75% on cpu#1"
    assert explain(split_of(devices="cpu,cpu", split_mode="tensor"))["experts_apart"] == ""


@pytest.mark.parametrize("backend", ["reference", "cpu-exact"])
@pytest.mark.parametrize("shares", [(1, 0), (1, 1)])
def test_by_layers_devices_share_the_experts_of_a_layer_that_one_has_otherwise(
    shared: Path, backend: str, shares: tuple[int, int]
) -> None:
    path, tokens = shared / "golden" / "qwen3moe" / "model.gguf", list(range(30))
    settings: dict[str, Any] = {"backend": backend, "n_ctx": 64, "cache_type_k": "f32", "cache_type_v": "f32"}
    crew = {
        "devices": "cpu,cpu",
        "split_mode": "layer",
        "tensor_split": shares,
        "n_cpu_moe": 2,
        "expert_split": (1, 1),
    }
    with LLM(path, **settings) as one, LLM(path, **settings, **crew) as two:
        for effort in ({}, {"n_layer_exit": 2}, {"n_expert_used": 1}):
            difference = np.abs(two.logits(tokens, **effort) - one.logits(tokens, **effort)).max()
            assert difference <= 1e-3
