"""Requests to a model with recurrent states: chats, preemption, cancellation, drafts, failures, fewer layers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motley import LLM

BLOCK = 16
OPTIONS: dict[str, Any] = {
    "backend": "reference",
    "n_ctx": 1024,
    "cache_type_k": "f32",
    "cache_type_v": "f32",
    "kv_block_size": BLOCK,
}


@pytest.fixture(scope="module")
def path(shared: Path) -> Path:
    return shared / "golden" / "qwen3next" / "model.gguf"


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **OPTIONS, n_parallel=2) as llm:
        yield llm
        llm._loaded.cache.check_integrity()


def answer(llm: LLM, prompt: list[int], n_tokens: int = 6, **options: Any) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and how many of the prompt were found."""
    found = llm.generate(prompt, max_tokens=n_tokens, temperature=0, ignore_eos=True, **options)
    return found.tokens, found.timings.cached_tokens


def text(n_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n_tokens)]


def chat_model(shared: Path, folder: Path, template: str) -> Path:
    """A tiny random model whose vocabulary has the template's control tokens."""
    sys.path.append(str(Path(__file__).parent.parent / "models"))
    from hf_to_gguf import to_gguf
    from tiny_models import QWEN3NEXT

    content = to_gguf(QWEN3NEXT.build())
    names = content.metadata["tokenizer.ggml.tokens"]
    assert isinstance(names, list)
    names[-3:] = ["<|im_start|>", "<think>", "<|im_end|>"]
    content.metadata["tokenizer.chat_template"] = (shared / "data" / "templates" / template).read_text()
    return content.write(folder / "chat.gguf")


@pytest.mark.parametrize("template", ["Qwen-QwQ-32B.jinja", "Qwen-Qwen3-0.6B.jinja"])
def test_each_turn_of_a_chat_computes_its_new_tokens_and_at_most_one_block(
    shared: Path, tmp_path: Path, template: str
) -> None:
    """The template removes the reasoning of earlier answers, so no prompt begins with all that was computed before."""
    with LLM(chat_model(shared, tmp_path, template), **OPTIONS, n_parallel=2) as llm:
        messages: list[dict[str, str]] = [{"role": "system", "content": "Answer in a few words."}]
        computed: list[int] = []  # tokens of the turn before, answer included
        for turn in range(10):
            messages.append(
                {"role": "user", "content": f"Question {turn}: what about the number {turn * 37}?"}
            )
            prompt = list(llm.tokenizer.encode_marked(llm.chat_template.render_marked(messages)))
            found = llm.generate(prompt, max_tokens=7, temperature=0, ignore_eos=True)
            n_common = next(
                (i for i, (a, b) in enumerate(zip(prompt, computed, strict=False)) if a != b),
                min(len(prompt), len(computed)),
            )
            assert n_common < len(computed) or not turn, "the template kept the reasoning"
            n_new = len(prompt) - n_common
            assert len(prompt) - found.timings.cached_tokens <= n_new + BLOCK, turn
            computed = [*prompt, *found.tokens]
            thought = f"<think>\nthe number is {turn}\n</think>\n\n"
            messages.append({"role": "assistant", "content": f"{thought}The answer is {turn}."})
        llm._loaded.cache.check_integrity()


def test_the_end_of_an_answer_is_found_by_its_continuation(llm: LLM) -> None:
    prompt = text(40, seed=1)
    first, _ = answer(llm, prompt)
    longer = [*prompt, *first, *text(5, seed=2)]
    _, n_cached = answer(llm, longer)
    assert n_cached == len(prompt) + len(first) - 1, "the last token of an answer is never computed"


def test_preempted_requests_continue_from_a_checkpoint_with_the_same_answer(path: Path) -> None:
    prompts = [text(60, seed) for seed in (3, 4, 5)]
    with LLM(path, **OPTIONS, prefix_cache=False) as llm:
        expected = [answer(llm, prompt, 40)[0] for prompt in prompts]
    with LLM(path, **OPTIONS, n_parallel=3, kv_cache_tokens=16 * BLOCK) as llm:
        found = llm.generate(prompts, max_tokens=40, temperature=0, ignore_eos=True)
        assert sum(completion.timings.n_preemptions for completion in found) > 0
        assert [completion.tokens for completion in found] == expected
        llm._loaded.cache.check_integrity()


def test_drafts_do_not_change_answers(llm: LLM, path: Path) -> None:
    prompt = text(12, seed=6) * 4  # repeats itself: the lookup finds drafts, most of them wrong
    with LLM(path, **OPTIONS, prefix_cache=False) as plain:
        expected = answer(plain, prompt, 30, speculative="off")[0]
    found = llm.generate(
        prompt, max_tokens=30, temperature=0, ignore_eos=True, speculative="lookup", draft_max=20
    )
    assert found.tokens == expected
    again, n_cached = answer(llm, [*prompt, *found.tokens], 5)
    assert n_cached > len(prompt)
    with LLM(path, **OPTIONS, prefix_cache=False) as plain:
        assert again == answer(plain, [*prompt, *found.tokens], 5)[0]


def test_cancelled_requests_leave_a_sound_cache(llm: LLM) -> None:
    prompt = text(50, seed=7)
    stream = llm.stream(prompt, max_tokens=50, temperature=0, ignore_eos=True)
    next(iter(stream))
    stream.close()
    tokens, _ = answer(llm, prompt)
    assert tokens == answer(llm, prompt)[0]


@pytest.mark.parametrize("effort", [{"n_layer_exit": 2}, {"n_expert_used": 1}])
def test_requests_of_another_effort_do_not_share_states(llm: LLM, effort: dict[str, int]) -> None:
    prompt = text(50, seed=8)
    reduced, n_cached = answer(llm, prompt, **effort)
    assert n_cached == 0
    full, n_cached = answer(llm, prompt)
    assert n_cached == 0
    assert answer(llm, prompt, **effort) == (reduced, 48)
    assert answer(llm, prompt) == (full, 48)


def test_figures_count_states(llm: LLM) -> None:
    answer(llm, text(40, seed=9))
    stats = llm.kv_stats()
    states = stats.use.groups[-1]
    assert (states.name, states.is_state, states.n_used) == ("states", True, 0)
    assert states.n_cached > 0
    assert stats.layout.state is not None
    slot = 3 * 4 * (4 * 64 * 64 + 3 * 512)  # three layers, float32: matrices and the convolution's inputs
    assert stats.layout.state.slot_bytes == slot
    assert stats.n_blocks == stats.use.groups[0].n_blocks
    assert sum(device.reserved for device in stats.devices) > states.n_blocks * slot
