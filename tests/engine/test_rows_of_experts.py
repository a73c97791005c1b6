"""Rows of models with experts have the same bits alone and beside others, with quantized and with float activations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from motley import LLM
from motley.bundled import bundled_experts_path

TEXT = "Once upon a time there was a little dog who lived in a house by the sea."


def logits(backend: str, *portions: int) -> list[npt.NDArray[np.float32]]:
    """The logits of a text that is fed in portions of so many tokens, for each size of portions."""
    found = []
    with LLM(bundled_experts_path(), n_ctx=64, backend=backend, prefix_cache=False) as llm:
        tokens = llm.tokenizer.encode(TEXT)
        for n in portions:
            with llm.raw_sequence() as sequence:
                rows = [sequence.feed(tokens[i : i + n]).numpy() for i in range(0, len(tokens), n)]
            found.append(np.concatenate(rows))
    return found


@pytest.mark.parametrize("backend", ["cpu", "cpu-exact"])
def test_rows_have_the_same_bits_in_portions_of_any_size(backend: str) -> None:
    first, *others = logits(backend, 1, 2, 3, 4, 9)
    for other in others:
        np.testing.assert_array_equal(first, other)
