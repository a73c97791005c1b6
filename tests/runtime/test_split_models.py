"""Models on crews of unequal devices answer as one device does, and talk no more than they must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from motley import LLM
from motley.gguf import read_spec
from motley.graph import CACHE
from motley.graph.ops import Weight
from motley.models import BatchShape, GraphOptions, read_params
from motley.ownership import Split, sole_owner
from motley.runtime import ModelSplit, make_crew
from motley.runtime.explain import explain
from motley.runtime.loading import weight_bytes
from thorough import first

ARCHITECTURES = ("gemma3", "glm4moe", "gpt-oss", "llama", "phi3", "qwen2", "qwen3", "qwen3moe", "qwen3vlmoe")
WITH_EXPERTS = ("glm4moe", "gpt-oss", "qwen3moe", "qwen3vlmoe")
CREWS = ((1, 1), (3, 1), (2, 1, 1), (1, 0, 1), (1,) * 5, (1,) * 7)
N_PROMPT, N_NEW = 48, 16
TOLERANCE = 1e-3

Logits = npt.NDArray[np.float32]


def open_llm(path: Path, mode: str = "none", shares: Sequence[int] = (1,), **options: Any) -> LLM:
    return LLM(
        path,
        n_ctx=N_PROMPT + N_NEW,
        n_parallel=1,
        cache_type_k="f32",
        cache_type_v="f32",
        backend="reference",
        devices=["cpu"] * len(shares),
        split_mode=mode,
        tensor_split=shares,
        **options,
    )


def continued(llm: LLM, prompt: list[int]) -> list[int]:
    return list(llm.generate(prompt, max_tokens=N_NEW, temperature=0, ignore_eos=True).tokens)


@dataclass(frozen=True)
class Alone:
    """A model, and what one device makes of it."""

    path: Path
    prompt: list[int]
    new: list[int]  # greedy
    logits: Logits  # of the prompt and the new tokens

    @staticmethod
    def of(path: Path) -> Alone:
        prompt = np.load(path.parent / "tokens.npy")[:N_PROMPT].tolist()
        with open_llm(path) as llm:
            new = continued(llm, prompt)
            return Alone(path, prompt, new, llm.logits(prompt + new))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, shared: Path) -> Path:
    path: Path = shared / "golden" / request.param
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Alone:
    return Alone.of(folder / "model.gguf")


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Alone:
    (path,) = folder.glob("model-*.gguf")
    return Alone.of(path)


def check_logits(alone: Alone, mode: str, shares: Sequence[int]) -> None:
    """Given the tokens before, each greedy token is the likeliest on the crew too: so the crew continues alike."""
    with open_llm(alone.path, mode, shares) as llm:
        logits = llm.logits(alone.prompt + alone.new)
    assert np.abs(logits - alone.logits).max() <= TOLERANCE
    assert logits[N_PROMPT - 1 : -1].argmax(-1).tolist() == alone.new


@pytest.mark.parametrize("shares", first(4, CREWS))
def test_tensors_split_over_a_crew_give_the_same_logits(plain: Alone, shares: tuple[int, ...]) -> None:
    check_logits(plain, "tensor", shares)


@pytest.mark.parametrize("shares", first(3, CREWS))
def test_layers_split_over_a_crew_give_the_same_logits(plain: Alone, shares: tuple[int, ...]) -> None:
    check_logits(plain, "layer", shares)


@pytest.mark.parametrize("shares", first(2, CREWS))
def test_quantized_tensors_split_over_a_crew_give_the_same_logits(
    quantized: Alone, shares: tuple[int, ...]
) -> None:
    check_logits(quantized, "tensor", shares)


@pytest.mark.parametrize(("mode", "shares"), [("tensor", (2, 1, 1)), ("layer", (1, 0, 1))])
def test_a_crew_generates_the_same_tokens_in_chunks(plain: Alone, mode: str, shares: tuple[int, ...]) -> None:
    """The prompt comes in batches, of which only the last wants logits, and then token by token."""
    with open_llm(plain.path, mode, shares, n_batch=20) as llm:
        assert continued(llm, plain.prompt) == plain.new


def test_quantized_layers_generate_the_same_tokens(quantized: Alone) -> None:
    with open_llm(quantized.path, "layer", (3, 1)) as llm:
        assert continued(llm, quantized.prompt) == quantized.new


def model_split(path: Path, mode: str, shares: Sequence[int], split_experts: str = "auto") -> ModelSplit:
    spec = read_spec(path)
    crew = make_crew(["cpu"] * len(shares), mode, shares, split_experts=split_experts)
    return ModelSplit(spec, read_params(spec), crew, GraphOptions(N_PROMPT))


def all_have_a_part(split: ModelSplit) -> bool:
    """Whether each device that has a share has heads and FFN columns in every layer."""
    graph = split.split(BatchShape(1, 1))
    wanted = [share > 0 for share in split.crew.shares]
    states = [
        graph.state(t)
        for t in graph.graph.weights
        if t.name.endswith(("attn_output.weight", "ffn_down.weight", "ffn_down_shexp.weight"))
    ]
    return all(
        isinstance(state, Split) and [n > 0 for n in state.word.counts(len(wanted))] == wanted
        for state in states
    )


@pytest.mark.parametrize(
    "batch", [BatchShape(1, 1), BatchShape(N_PROMPT, 1), BatchShape(7, 7), BatchShape(5, 0)]
)
def test_two_sums_a_layer_and_one_gather_of_logits(folder: Path, batch: BatchShape) -> None:
    """Exactly these, where each device has a part of everything. For other crews of models with experts, see below."""
    n_exact = 0
    for shares in CREWS:
        split = model_split(folder / "model.gguf", "tensor", shares)
        found = Counter(t.kind for t in split.split(batch).collectives)
        if all_have_a_part(split):
            assert found == {"all_reduce": 2 * split.params.n_layers, "all_gather": 1}, shares
            n_exact += 1
    # The columns of glm4moe's shared expert are two units: no crew of three or more devices has all parts.
    assert n_exact >= (2 if folder.name == "glm4moe" else 3)


@pytest.mark.parametrize("way", ["ffn", "whole"])
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_experts_are_summed_up_once_a_layer_however_they_are_split(
    shared: Path, architecture: str, way: str
) -> None:
    """Routed and shared experts in one sum: two collectives a layer, by `motley explain`.

    Two all-reduces if each device has a KV head. With shares (3, 1) and two KV heads, one device has all heads of some
    layers: then x is broadcast once, for the router and the experts together.
    """
    path = shared / "golden" / architecture / "model.gguf"
    for shares in CREWS:
        contents = explain(model_split(path, "tensor", shares, way))
        assert contents["split_experts"] == way
        for section in contents["sections"]:
            assert len(section["collectives"]) <= 2, shares
        assert sum(contents["collectives"].values()) <= 2 * n_layers(path) + 1, shares
        if shares in ((1, 1), (1, 0, 1)):  # crews that have a KV head each
            assert contents["collectives"] == {"all_reduce": 2 * n_layers(path), "all_gather": 1}


@pytest.mark.parametrize("way", ["ffn", "whole"])
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_both_ways_to_split_experts_give_the_same_logits(shared: Path, architecture: str, way: str) -> None:
    (quantized,) = (shared / "golden" / architecture).glob("model-*.gguf")
    alone = Alone.of(quantized)
    for shares in ((3, 1), (2, 1, 1), (1, 0, 1), (1,) * 7):
        with open_llm(alone.path, "tensor", shares, split_experts=way) as llm:
            logits = llm.logits(alone.prompt + alone.new)
        assert np.abs(logits - alone.logits).max() <= TOLERANCE, shares


@pytest.mark.parametrize(
    ("architecture", "shares"),
    [("glm4moe", (20, 0, 3, 2)), ("qwen3next", (1, 3, 20, 2)), ("qwen3next", (4, 1))],
)
def test_a_shared_expert_on_another_device_than_the_routed_ones_costs_no_more(
    shared: Path, architecture: str, shares: tuple[int, ...]
) -> None:
    path = shared / "golden" / architecture / "model.gguf"
    split = model_split(path, "tensor", shares, "ffn")
    for section in explain(split)["sections"]:
        assert len(section["collectives"]) <= 2, section["name"]
    tokens = list(range(20))
    with open_llm(path) as one, open_llm(path, "tensor", shares, split_experts="ffn") as crew:
        assert np.abs(crew.logits(tokens) - one.logits(tokens)).max() <= TOLERANCE


def test_the_way_that_meets_the_shares_is_chosen(shared: Path) -> None:
    """64 columns are two quant blocks of 32; eight experts are finer."""
    (path,) = (shared / "golden" / "qwen3moe").glob("model-*.gguf")
    halves, uneven = (explain(model_split(path, "tensor", shares)) for shares in ((1, 1), (5, 3)))
    assert halves["split_experts"] == "ffn"
    assert uneven["split_experts"] == "whole"
    assert "12.5%" in uneven["split_experts_reason"]


def n_layers(path: Path) -> int:
    return read_params(read_spec(path)).n_layers


@pytest.mark.parametrize("shares", CREWS)
def test_layers_are_handed_over_once_between_neighbours(folder: Path, shares: tuple[int, ...]) -> None:
    split = model_split(folder / "model.gguf", "layer", shares)
    graph = split.split(BatchShape(3, 1))
    n_busy = len({sole_owner(graph.state(t)) for t in graph.graph.weights} - {None})
    kinds = [t.kind for t in graph.collectives]
    # One more where the first device has the output matrix: the last layer's result goes back to it.
    owners = [
        (t.op.role, sole_owner(graph.state(t))) for t in graph.graph.weights if isinstance(t.op, Weight)
    ]
    of_last = {owner for role, owner in owners if role.layer == split.params.n_layers - 1}
    of_output = {owner for role, owner in owners if role.layer is None} - {None}
    goes_back = not of_output <= of_last
    assert not goes_back or of_output == {0}
    assert kinds == ["send"] * (n_busy - 1 + goes_back) + ["broadcast"]


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_a_device_without_a_share_holds_norms_at_most(folder: Path, mode: str) -> None:
    split = model_split(folder / "model.gguf", mode, (1, 0, 1))
    shares = [split.share(device, BatchShape(3, 1)) for device in range(3)]
    first, idle, last = map(weight_bytes, shares)
    assert idle < 0.05 * min(first, last)
    assert all(t.shape[0] == 0 for t in shares[1].graph.inputs if t.dtype == CACHE)
