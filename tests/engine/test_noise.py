"""Counter-based random numbers: the published generator, one number for each (seed, index, token), and Gumbel's law."""

from __future__ import annotations

import numpy as np
import pytest
from draws import follow, probabilities
from hypothesis import given
from hypothesis import strategies as st

from motley.engine.noise import gumbel, philox, words

ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)
seeds, indices = st.integers(0, 2**64 - 1), st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that the generator's authors publish
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    drawn = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert drawn[:, 0].tolist() == expected


@given(seeds, indices, ids)
def test_a_tokens_word_does_not_depend_on_who_else_is_asked_for(
    seed: int, index: int, tokens: list[int]
) -> None:
    together = words(seed, index, np.array(tokens))
    assert together.tolist() == [int(words(seed, index, np.array([token]))[0]) for token in tokens]


def test_a_whole_row_has_the_words_of_its_tokens() -> None:
    row, some = words(5, 9, np.arange(5000)), np.arange(0, 5000, 7)
    assert row[some].tolist() == [int(words(5, 9, np.array([token]))[0]) for token in some]


@pytest.mark.parametrize(("other_seed", "other_index"), [(1, 0), (2**32, 0), (0, 1), (0, 2**32)])
def test_seed_and_index_count_in_all_their_bits(other_seed: int, other_index: int) -> None:
    tokens = np.arange(100)
    assert not np.intersect1d(words(0, 0, tokens), words(other_seed, other_index, tokens)).size


@pytest.mark.parametrize(("temperature", "is_right"), [(1.0, True), (1.1, False)])
def test_the_largest_logit_with_noise_is_a_draw(temperature: float, is_right: bool) -> None:
    """And a temperature that is wrong by a tenth is found out."""
    logits, tokens = np.linspace(-2, 2, 30), np.arange(30)
    drawn = [int((logits + gumbel(11, i, tokens)).argmax()) for i in range(20_000)]
    assert follow(drawn, probabilities(logits, temperature)) == is_right


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for extreme in (0, 2**32 - 1):
        monkeypatch.setattr("motley.engine.noise.words", lambda *_, word=extreme: np.array([word], np.uint64))
        assert np.isfinite(gumbel(0, 0, np.array([0]))).all()
