"""Texts with and without drafts on a real GPU: they part only where two logits are closer than rounding. Counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("triton")

from motley import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from by_hand import stepped_by_hand
from drafters import Guess, give, half, none, right, right_last, serve

Load = Callable[..., LLM]
STARTS = (
    "Once upon a time there was a little dog.",
    "The sea was",
    "He said that",
    "In the morning she",
    "A king had three sons",
    "They walked to the river and",
    "My friend told me",
    "It was a dark night, and",
    "The old house",
    "Two birds sat on a tree.",
)
N_TOKENS = 64


def logits_of(llm: LLM, tokens: Sequence[int], n_last: int, n_rows: int) -> npt.NDArray[np.float32]:
    """Logits (n_last, vocab) after the last tokens, of which `n_rows` are computed at a time."""
    n_before = len(tokens) - n_last
    with llm.raw_sequence() as sequence:
        if n_before:
            sequence.feed(tokens[:n_before], n_outputs=1)
        rows = [sequence.feed(tokens[i : i + n_rows]) for i in range(n_before, len(tokens), n_rows)]
    return np.concatenate([row.numpy() for row in rows])


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """One after the other: other numbers of requests round differently, too."""
    params = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
    engine = llm._loaded.engine
    return [tuple(serve(engine, [prompt], [params])[0].generated) for prompt in prompts]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("guess", [right, half, right_last], ids=lambda guess: guess.__name__)
def test_texts_part_only_where_two_logits_are_nearly_equal(
    load: Load, kind: str, guess: Guess, record_property: Callable[[str, object], None]
) -> None:
    llm = load(cache_type_k=kind, cache_type_v=kind)
    prompts = [llm.tokenizer.encode(start) for start in STARTS]
    with stepped_by_hand(llm):
        give(llm, none)
        without = answers(llm, prompts)
        drafter = give(llm, guess)
        drafter.answers |= dict(zip(map(tuple, prompts), without, strict=True))
        found = answers(llm, prompts)
    assert sum(drafter.n_accepted) > N_TOKENS
    alone, *together = (logits_of(llm, [*prompts[0], *without[0]], N_TOKENS, n) for n in (1, 2, 4, 8, 16))
    rounding = max(float(np.abs(alone - each).max()) for each in together)
    n_parted = 0
    for prompt, text, other in zip(prompts, without, found, strict=True):
        if text == other:
            continue
        n_parted += 1
        n_alike = next(i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b)
        last = logits_of(llm, [*prompt, *text[:n_alike]], 1, 1)[0]
        best = float(last.max())
        assert best - last[text[n_alike]] <= 2 * rounding, (n_alike, text, other)
        assert best - last[other[n_alike]] <= 2 * rounding, (n_alike, text, other)
    record_property("texts that parted", f"{n_parted} of {len(prompts)}, rounding of logits {rounding:.3f}")
    print(f"{kind}, {guess.__name__}: {n_parted} of {len(prompts)} texts parted, rounding {rounding:.3f}")
    spread = float(np.std(logits_of(llm, prompts[0], 1, 1)))
    assert rounding < spread  # otherwise anything would pass
