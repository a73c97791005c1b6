"""The bundled model finds needles in a quantized cache, and a crew answers to the byte as any other crew."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley import LLM
from motley.bundled import RecallPrompt, bundled_model_path, is_recalled, make_recall_prompts
from motley.gguf import read_spec
from motley.text import Tokenizer

N_NEEDLES, N_TOKENS, N_ANSWER = 5, 320, 16
CREWS = (("layer", (3, 1)), ("tensor", (3, 1)), ("tensor", (2, 1, 1)), ("tensor", (0, 1, 2)))


@pytest.fixture(scope="module")
def needles(shared: Path) -> list[RecallPrompt]:
    """From the start of a passage to its end."""
    book = (shared / "data" / "corpora" / "frankenstein.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_spec(read_spec(bundled_model_path()))
    return make_recall_prompts(tokenizer.encode, book, N_NEEDLES, N_TOKENS, seed=4)


def answers(needles: list[RecallPrompt], cache_type: str, mode: str, shares: tuple[int, ...]) -> list[str]:
    """Up to the full stop, all needles at once."""
    with LLM(
        bundled_model_path(),
        n_ctx=N_TOKENS + N_ANSWER,
        n_parallel=len(needles),
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        backend="reference",
        devices=["cpu"] * len(shares),
        split_mode=mode,
        tensor_split=shares,
    ) as llm:
        prompts = [needle.tokens for needle in needles]
        found = llm.generate(prompts, max_tokens=N_ANSWER, temperature=0, stop=(".",))
    assert all(answer.finish_reason == "stop" for answer in found)
    return [answer.text for answer in found]


def test_needles_lie_at_several_depths(needles: list[RecallPrompt]) -> None:
    depths = sorted(1 - needle.distance / len(needle.tokens) for needle in needles)
    assert depths[0] < 0.25
    assert depths[-1] > 0.75


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
@pytest.mark.slow
def test_crews_find_every_needle_and_agree_to_the_byte(needles: list[RecallPrompt], cache_type: str) -> None:
    found = [answers(needles, cache_type, mode, shares) for mode, shares in CREWS]
    assert found == [found[0]] * len(CREWS)
    assert all(is_recalled(*pair) for pair in zip(needles, found[0], strict=True)), found[0]
