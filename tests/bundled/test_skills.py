"""What the bundled models can do, greedy, on held-out items: the bars of the card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from training.evaluate import FRESH_SEED, has_word_loop, measure_agreement, measure_skills, measure_stories

from motley import LLM
from motley.bundled import (
    bundled_draft_path,
    bundled_experts_path,
    bundled_model_path,
    is_recalled,
    make_recall_prompts,
)

BARS = {"json": 0.9, "tool call": 0.9, "tool result": 0.85, "context": 0.85, "sums": 0.9}
CONSISTENT, EXIT_AGREES, DRAFT_AGREES, RECALLED = 0.9, 0.7, 0.65, 0.95
FEW, MANY, FEW_STORIES = 24, 100, 12


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(bundled_model_path(), n_parallel=16) as llm:
        yield llm


@pytest.mark.parametrize("skill", BARS)
def test_a_skill_reaches_its_bar(llm: LLM, skill: str) -> None:
    assert measure_skills(llm, [skill], FEW, FRESH_SEED)[skill] >= BARS[skill]


@pytest.mark.slow
@pytest.mark.parametrize("skill", BARS)
def test_a_skill_reaches_its_bar_on_many_items(llm: LLM, skill: str) -> None:
    assert measure_skills(llm, [skill], MANY, FRESH_SEED)[skill] >= BARS[skill]


@pytest.mark.parametrize("skill", BARS)
def test_the_experts_reach_the_same_bars(skill: str) -> None:
    with LLM(bundled_experts_path(), n_parallel=16) as experts:
        assert measure_skills(experts, [skill], FEW, FRESH_SEED)[skill] >= BARS[skill]


def test_stories_keep_to_their_world(llm: LLM) -> None:
    assert measure_stories(llm, FEW_STORIES, FRESH_SEED)["consistent"] >= CONSISTENT


@pytest.mark.slow
def test_a_hundred_stories_keep_to_their_world_and_turn_in_no_circles(llm: LLM) -> None:
    shares = measure_stories(llm, 100, FRESH_SEED)
    assert shares["consistent"] >= CONSISTENT
    assert shares["without loops"] >= shares["without loops, the generator's own"] - 0.05


def test_a_loop_is_four_words_three_times() -> None:
    assert has_word_loop("She ran to the mill. She ran to the lake. She ran to the hill.")
    assert not has_word_loop("She ran to the mill. He ran to the lake. They went to the hill.")
    far = " ".join(f"word{i}" for i in range(120))
    assert not has_word_loop(f"She ran to the mill. She ran to the lake. {far} She ran to the hill.")


def test_half_of_the_layers_and_the_draft_model_agree_with_the_whole(llm: LLM) -> None:
    with LLM(bundled_draft_path()) as draft:
        shares = measure_agreement(llm, draft, 1, FRESH_SEED, n_layer_exit=4)
    assert shares["exit after 4 layers"] >= EXIT_AGREES
    assert shares["draft"] >= DRAFT_AGREES


@pytest.mark.slow
def test_secrets_are_found_in_two_thousand_tokens(llm: LLM, shared: Path) -> None:
    book = (shared / "data" / "corpora" / "war-and-peace.txt").read_text(encoding="utf-8")[-80_000:]
    prompts = make_recall_prompts(llm.tokenizer.encode, book, 8, 2000, seed=FRESH_SEED)
    found = llm.generate([prompt.tokens for prompt in prompts], max_tokens=16, temperature=0, stop=(".",))
    right = [is_recalled(prompt, answer.text) for prompt, answer in zip(prompts, found, strict=True)]
    assert sum(right) / len(right) >= RECALLED


def test_it_says_what_it_can_do(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "What can you do?"}], temperature=0).text
    for ability in ("stories", "questions", "numbers", "JSON", "tools"):
        assert ability in answer


def test_the_demo_tells_a_story_of_its_own_accord_to_the_end(llm: LLM) -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    request = re.findall(r'motley run -p "(.*?)"', makefile)[0]
    story = llm.chat([{"role": "user", "content": request}], temperature=0, max_tokens=400)
    assert story.finish_reason == "stop"
    assert all(word in story.text for word in ("fox", "Ada", "red kite"))
