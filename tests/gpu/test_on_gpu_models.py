"""A whole model on a GPU: logits against the reference backend, graphs against launches, crews against one device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from by_hand import stepped_by_hand

from motley import LLM
from motley.backends.cuda import staging
from motley.backends.cuda.backend import CudaBackend

TEXT = "Once upon a time there was a king who had three sons, and the youngest of them was called"
ONE: dict[str, Any] = {}
TENSOR: dict[str, Any] = {"devices": "cuda:0,cuda:0", "split_mode": "tensor", "tensor_split": (3, 1)}
LAYER: dict[str, Any] = {"devices": "cuda:0,cuda:0", "split_mode": "layer"}
UNLIKE: dict[str, Any] = {"devices": "cuda:0,cpu", "split_mode": "tensor", "tensor_split": (3, 1)}
CREWS = pytest.mark.parametrize(
    "crew", [ONE, TENSOR, LAYER, UNLIKE], ids=["one", "tensor", "layer", "with a CPU"]
)

Load = Callable[..., LLM]
Floats = npt.NDArray[np.float32]


def stepwise(llm: LLM, n_prompt: int, n_steps: int) -> Floats:
    """Logits (steps, vocab) of a text, fed as a prompt and then token by token: launched, captured, replayed."""
    tokens = llm.tokenizer.encode(TEXT * 4)
    with llm.raw_sequence() as sequence:
        rows = [sequence.feed(tokens[:n_prompt], n_outputs=1)]
        rows += [sequence.feed([token]) for token in tokens[n_prompt : n_prompt + n_steps]]
    return np.concatenate([row.numpy() for row in rows])


@CREWS
@pytest.mark.parametrize(
    "kinds", [("f16", "f16"), ("q8_0", "q4_0"), ("q4_0", "q4_0"), ("q5_1", "iq4_nl")], ids="/".join
)
def test_logits_are_the_reference_s(load: Load, crew: dict[str, Any], kinds: tuple[str, str]) -> None:
    types = {"cache_type_k": kinds[0], "cache_type_v": kinds[1]}
    expected = stepwise(load(devices="cpu", backend="reference", **types), 24, 12)
    got = stepwise(load(**types, **crew), 24, 12)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < 0.05  # activations are int8 per 32 values in decode
    assert (got.argmax(1) == expected.argmax(1)).mean() > 0.8


@CREWS
def test_embeddings_are_the_reference_s(load: Load, crew: dict[str, Any]) -> None:
    expected = load(devices="cpu", backend="reference").embed([TEXT, "The sea"])
    got = load(**crew).embed([TEXT, "The sea"])
    assert (got * expected).sum(1).min() > 0.99


@CREWS
def test_what_is_replayed_gives_the_bits_of_what_was_launched(load: Load, crew: dict[str, Any]) -> None:
    llm = load(cache_type_k="q8_0", cache_type_v="q8_0", **crew)
    first = stepwise(llm, 24, 12)
    for _ in range(3):
        assert np.array_equal(stepwise(llm, 24, 12), first)


def test_a_batch_that_outgrows_its_memory_is_captured_again(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the graph that was thrown away was the only one."""
    expected = stepwise(load(kv_block_size=16), 4, 60)
    monkeypatch.setattr(staging, "_SPARE", 2)
    monkeypatch.setattr(staging, "_ROW_SPARE", 0)
    assert np.array_equal(stepwise(load(kv_block_size=16), 4, 60), expected)


@pytest.mark.parametrize("crew", [ONE, TENSOR], ids=["one", "tensor"])
def test_padded_batches_answer_as_full_ones(load: Load, crew: dict[str, Any]) -> None:
    """Three requests run in a plan for four."""
    llm = load(cache_type_k="q8_0", cache_type_v="q8_0", **crew)
    prompts = [f"{name} went into the wood" for name in ("Anna", "Tom", "The dog", "Nobody")]
    answers = [[s.finish().tokens for s in streams(llm, prompts[:n])] for n in (3, 4)]
    assert answers[0] == answers[1][:3]


def test_many_requests_with_copies_of_matrices_answer_as_without(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are rounded otherwise, so that a few answers may differ."""
    prompts = [[5 + i, 9, 7 + i] for i in range(100)]
    options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with_copies = load(n_parallel=128)
    assert any("16 bits" in detail for detail in with_copies.details)
    got = with_copies.generate(prompts, **options)
    monkeypatch.setattr(CudaBackend, "offer_spare", lambda *_: None)
    expected = load(n_parallel=128).generate(prompts, **options)
    assert sum(a.tokens == b.tokens for a, b in zip(got, expected, strict=True)) >= 85


def test_planning_ahead_is_not_seen_in_answers(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing, blind = (load(cache_type_k="q4_0", cache_type_v="q4_0") for _ in range(2))
    monkeypatch.setattr(blind._loaded.engine.scheduler, "plan_ahead", lambda **_: None)
    prompts = [TEXT[: 12 + 9 * i] for i in range(7)]
    answers = [[s.finish().tokens for s in streams(llm, prompts)] for llm in (seeing, blind)]
    assert answers[0] == answers[1]


def streams(llm: LLM, prompts: list[str]) -> list[Any]:
    """Requests that run side by side, and end one after the other. All are there before the first step: prompts that
    come one by one make other batches, whose products round otherwise.
    """
    with stepped_by_hand(llm):
        return [
            llm.stream(prompt, max_tokens=20 + 3 * i, temperature=0.0, ignore_eos=True)
            for i, prompt in enumerate(prompts)
        ]
