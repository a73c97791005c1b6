"""Recall: whether a model finds a sentence in its context. See `motley.bundled.recall` for the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from motley.bundled import RecallPrompt, is_recalled
from motley.llm import LLM

ANSWER_ROOM = 32  # tokens of context left free for the answer: more than any invented word has
_SPARE_TOKENS = 2  # beyond the answer: enough to see that the word ends there


@dataclass(frozen=True)
class Recall:
    """How many needles were found, of how many questions."""

    n_found: int
    n_asked: int

    @property
    def share(self) -> float:
        return self.n_found / self.n_asked


def answer(llm: LLM, prompt: RecallPrompt) -> str:
    """The beginning of the model's greedy answer: `_SPARE_TOKENS` more than the expected answer has."""
    n_tokens = len(llm.tokenizer.encode(f" {prompt.answer}", add_special=False))
    return llm.generate(prompt.tokens, max_tokens=n_tokens + _SPARE_TOKENS, temperature=0).text


def measure_recall(
    llm: LLM, prompts: Sequence[RecallPrompt], advance: Callable[[], None] = lambda: None
) -> Recall:
    """How many of the needles greedy decoding finds. `advance` is called after each prompt."""
    n_found = 0
    for prompt in prompts:
        n_found += is_recalled(prompt, answer(llm, prompt))
        advance()
    return Recall(n_found, len(prompts))
