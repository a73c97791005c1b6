"""Experts and layers per request: in one engine, each request answers as if all were of its kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motley import LLM
from motley.engine.effort import FULL, Effort, Efforts
from motley.errors import RequestError

PROMPT = [
    231,
    6,
    136,
    93,
    142,
    96,
    40,
    112,
    186,
    151,
    113,
    313,
    39,
    72,
    119,
    59,
    99,
    312,
    58,
    134,
    121,
    182,
    145,
    287,
    99,
    307,
    206,
    29,
    113,
    200,
    123,
    80,
    44,
    217,
    187,
    186,
    81,
    136,
    140,
    162,
]  # after which every effort answers otherwise
N_NEW = 6


def open_llm(path: Path, **options: Any) -> LLM:
    settings = {"n_ctx": 96, "cache_type_k": "f32", "cache_type_v": "f32", "kv_block_size": 16}
    return LLM(path, backend="reference", **(settings | options))


@pytest.fixture(scope="module")
def path(shared: Path) -> Path:
    return shared / "golden" / "qwen3moe" / "model.gguf"


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with open_llm(path) as llm:
        yield llm


def greedy(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> tuple[int, ...]:
    return llm.generate(prompt, max_tokens=N_NEW, temperature=0, ignore_eos=True, **options).tokens


def test_requests_of_different_effort_run_in_one_engine_and_do_not_touch_each_other(path: Path) -> None:
    efforts: list[dict[str, Any]] = [
        {},
        {"n_expert_used": 1},
        {"n_expert_used": 5},
        {"n_layer_exit": 1},
        {"n_layer_exit": 2, "n_expert_used": 1},
    ]
    alone = []
    for effort in efforts:
        with open_llm(path, prefix_cache=False) as llm:
            alone.append(greedy(llm, **effort))
    assert len(set(alone)) == len(alone), f"the test's efforts give the same answer: {alone}"
    with open_llm(path, n_parallel=8) as llm:
        for _ in range(2):  # the second time there is a prefix cache to be fooled by
            streams = [
                llm.stream(PROMPT, max_tokens=N_NEW, temperature=0, ignore_eos=True, **effort)
                for effort in efforts
            ]
            assert [stream.finish().tokens for stream in streams] == alone


def test_a_full_request_never_finds_the_blocks_of_a_shallow_one(path: Path) -> None:
    with open_llm(path) as llm:
        options = {"max_tokens": 1, "temperature": 0}
        assert llm.generate(PROMPT, n_layer_exit=1, **options).timings.cached_tokens == 0
        assert llm.generate(PROMPT, **options).timings.cached_tokens == 0
        assert llm.generate(PROMPT, n_expert_used=1, **options).timings.cached_tokens == 0
        # Each finds its own; a number that is the file's own is no other effort.
        assert llm.generate(PROMPT, n_layer_exit=1, **options).timings.cached_tokens > 0
        assert llm.generate(PROMPT, n_expert_used=2, n_layer_exit=3, **options).timings.cached_tokens > 0


def test_what_the_model_is_opened_with_is_the_default_of_requests(path: Path, llm: LLM) -> None:
    with open_llm(path, n_expert_used=1, n_layer_exit=2) as reduced:
        np.testing.assert_array_equal(
            reduced.logits(PROMPT), llm.logits(PROMPT, n_expert_used=1, n_layer_exit=2)
        )
        np.testing.assert_array_equal(
            reduced.logits(PROMPT, n_expert_used=2, n_layer_exit=3), llm.logits(PROMPT)
        )
        assert greedy(reduced) == greedy(llm, n_expert_used=1, n_layer_exit=2)


def test_a_session_is_for_the_effort_that_it_was_computed_with(path: Path, tmp_path: Path) -> None:
    with open_llm(path, n_expert_used=1) as reduced:
        reduced.save_session(tmp_path / "session", PROMPT)
        expected = greedy(reduced)
    with open_llm(path, n_expert_used=1) as again:
        again.load_session(tmp_path / "session")
        answer = again.generate(PROMPT, max_tokens=N_NEW, temperature=0, ignore_eos=True)
        assert answer.timings.cached_tokens > 0
        assert answer.tokens == expected
    with open_llm(path) as full, pytest.raises(Exception, match="n_expert_used and n_layer_exit"):
        full.load_session(tmp_path / "session")


def test_a_full_request_finds_no_blocks_of_shallow_forks_nor_of_a_shifted_shallow_context(
    path: Path, llm: LLM, tmp_path: Path
) -> None:
    shallow: dict[str, Any] = {"n_layer_exit": 1, "ignore_eos": True}
    with open_llm(path) as mixed:
        mixed.generate(PROMPT, n=3, max_tokens=4, seed=1, **shallow)
        full = mixed.generate(PROMPT, max_tokens=N_NEW, temperature=0, ignore_eos=True)
        assert full.timings.cached_tokens == 0
        assert full.tokens == greedy(llm)
        shifted = mixed.generate(
            PROMPT, max_tokens=100, context_shift=True, n_keep=16, temperature=0, **shallow
        )
        continued = [*PROMPT[:16], *shifted.tokens[-40:]]
        assert greedy(mixed, continued) == greedy(llm, continued)


def test_requests_of_different_depth_survive_preemption_with_drafts(path: Path, llm: LLM) -> None:
    """The cache holds one of them at a time."""
    efforts: list[dict[str, Any]] = [{}, {"n_layer_exit": 1}, {"n_layer_exit": 2, "n_expert_used": 5}]
    long: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with open_llm(path, kv_cache_tokens=112, n_parallel=3, spec="lookup,exit") as small:
        streams = [small.stream(PROMPT, **long, **effort) for effort in efforts]
        answers = [stream.finish() for stream in streams]
    assert [answer.tokens for answer in answers] == [
        llm.generate(PROMPT, **long, **e).tokens for e in efforts
    ]
    assert sum(answer.timings.n_preemptions for answer in answers) > 0


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_a_crew_exits_early_as_one_device_does(path: Path, llm: LLM, mode: str) -> None:
    options = {"devices": "cpu,cpu,cpu", "split_mode": mode, "tensor_split": (2, 1, 1)}
    with open_llm(path, **options) as crew:
        for effort in ({"n_layer_exit": 1}, {"n_layer_exit": 2, "n_expert_used": 7}):
            difference = np.abs(crew.logits(PROMPT, **effort) - llm.logits(PROMPT, **effort)).max()
            assert difference <= 1e-3


IMPOSSIBLE = [
    *(
        ({"n_expert_used": value}, "n_expert_used must be an integer from 1 to 8")
        for value in (0, -1, 9, 10**10000)
    ),
    *(({"n_layer_exit": value}, "n_layer_exit must be an integer from 1 to 3") for value in (0, 4)),
]
NO_INTEGERS = [True, 2.0, 2.5, math.nan, "2", np.float64(2), np.bool_(True), [2]]


@pytest.mark.parametrize(("options", "allowed"), IMPOSSIBLE)
def test_impossible_values_are_refused_with_the_range(
    llm: LLM, options: dict[str, Any], allowed: str
) -> None:
    for use in (
        lambda: llm.logits(PROMPT, **options),
        lambda: llm.token_bytes(**options),
        lambda: llm.raw_sequence(**options),
    ):
        with pytest.raises(RequestError, match=allowed):
            use()
    with pytest.raises(RequestError, match=allowed.replace("8", "(8|the model's number of experts)")):
        llm.generate(PROMPT, max_tokens=1, **options)


@pytest.mark.parametrize(("options", "allowed"), IMPOSSIBLE)
def test_impossible_defaults_are_refused_before_anything_is_loaded(
    path: Path, options: dict[str, int], allowed: str
) -> None:
    with pytest.raises(RequestError, match=allowed):
        open_llm(path, progress=lambda done, total: pytest.fail("weights are being loaded"), **options)


@pytest.mark.parametrize("name", ["n_expert_used", "n_layer_exit"])
@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_refused_alike_everywhere(path: Path, llm: LLM, name: str, value: Any) -> None:
    for use in (
        lambda: llm.generate(PROMPT, max_tokens=1, **{name: value}),
        lambda: llm.logits(PROMPT, **{name: value}),
        lambda: open_llm(path, **{name: value}),
    ):
        with pytest.raises(RequestError, match=f"{name} must be an integer from 1 to "):
            use()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=lambda kind: kind.__name__)
def test_integers_of_any_library_are_accepted_everywhere(path: Path, llm: LLM, kind: Any) -> None:
    effort = {"n_expert_used": kind(1), "n_layer_exit": kind(2)}
    plain = {"n_expert_used": 1, "n_layer_exit": 2}
    np.testing.assert_array_equal(llm.logits(PROMPT, **effort), llm.logits(PROMPT, **plain))
    assert greedy(llm, **effort) == greedy(llm, **plain)
    with open_llm(path, **effort) as reduced:
        assert greedy(reduced) == greedy(llm, **plain)


def test_a_dense_model_has_no_experts_to_choose_from() -> None:
    efforts = Efforts(n_layers=4)
    with pytest.raises(RequestError, match="has no experts"):
        efforts.choose(n_expert_used=1)
    assert efforts.choose(n_layer_exit=4) == FULL
    assert efforts.choose(n_layer_exit=3) == Effort(n_layers=3)


def test_every_effort_has_a_salt_of_its_own() -> None:
    efforts = [Effort(n_experts, n_layers) for n_experts in range(12) for n_layers in range(12)]
    assert len({effort.salt for effort in efforts}) == len(efforts)


def test_a_text_is_forgotten_for_its_own_effort_and_salt(bundled: Path) -> None:
    prompt = list(range(3, 90))
    kinds: list[dict[str, Any]] = [{}, {"n_layer_exit": 1}, {"cache_salt": "mine"}]
    with LLM(bundled, n_ctx=256) as llm:

        def n_cached(kind: dict[str, Any]) -> int:
            return llm.generate(prompt, max_tokens=1, **kind).timings.cached_tokens

        for kind in kinds:
            n_cached(kind)
        for kind in kinds:
            assert all(n_cached(other) for other in kinds)
            llm.forget(prompt, **kind)
            assert [n_cached(other) > 0 for other in kinds] == [other != kind for other in kinds]


def test_a_prompt_of_text_is_forgotten_and_other_things_are_refused(bundled: Path) -> None:
    text = "There was a fox who lived in the forest with an owl, a hare and two small hedgehogs. " * 3
    with LLM(bundled, n_ctx=256) as llm:
        llm.generate(text, max_tokens=1)
        assert llm.generate(text, max_tokens=1).timings.cached_tokens
        llm.forget(text)
        assert not llm.generate(text, max_tokens=1).timings.cached_tokens
        with pytest.raises(RequestError):
            llm.forget(3)  # type: ignore[arg-type]
