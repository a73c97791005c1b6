"""Rows of models with experts, alone and beside others: they differ by rounding only, never by a wrong result.

The router multiplies one row in another order than several rows (csrc/kernels/matvec.hpp, tile.hpp). So
1 row differs from 2 by the last bits, and 2 rows from any other number not at all. Activations are quantized to 8 bits:
the last bits move a code here and there, and later layers see a change of 1/127, which is up to 0.2 in a logit. With
float activations and a float cache the same rows differ by less than 1e-4: the difference is rounding, amplified.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from motley import LLM
from motley.bundled import bundled_experts_path

TEXT = "Once upon a time there was a little dog who lived in a house by the sea."


def logits(backend: str, *portions: int, n_layers: int | None = None) -> list[npt.NDArray[np.float32]]:
    """The logits of a text that is fed in portions of so many tokens, for each size of portions."""
    options = {"cache_type_k": "f32", "cache_type_v": "f32", "prefix_cache": False, "n_layer_exit": n_layers}
    found = []
    with LLM(bundled_experts_path(), n_ctx=64, backend=backend, **options) as llm:
        tokens = llm.tokenizer.encode(TEXT)
        for n in portions:
            with llm.raw_sequence() as sequence:
                rows = [sequence.feed(tokens[i : i + n]).numpy() for i in range(0, len(tokens), n)]
            found.append(np.concatenate(rows))
    return found


@pytest.mark.parametrize("backend", ["cpu", "cpu-exact"])
def test_two_rows_and_more_have_the_same_bits(backend: str) -> None:
    # Portions that leave no single row at the end.
    first, *others = logits(backend, 2, 3, 4, 9)
    n = min(len(first), *map(len, others)) - 1
    for other in others:
        np.testing.assert_array_equal(first[:n], other[:n])


def test_one_row_differs_by_rounding() -> None:
    alone, together = logits("cpu-exact", 1, 8)
    assert np.abs(alone - together).max() < 1e-4


def test_one_row_of_quantized_activations_differs_by_rounding_in_the_first_layer() -> None:
    alone, together = logits("cpu", 1, 8, n_layers=1)
    assert np.abs(alone - together).max() < 1e-4
