"""The native sampler chooses what `engine.sampling` specifies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.backends import is_available
from motley.engine.choosing import ChoiceRow, CopyingChooser, HostChooser, NativeChooser
from motley.engine.sampling import SamplingParams, build_sampler
from motley.errors import RequestError

pytestmark = pytest.mark.skipif(not is_available(), reason="the native module is not built")

N_VOCAB = 10_240  # so that `sampling` takes up to 40 candidates in the order of ids where logits are equal


def rows_of(params: list[SamplingParams], indexes: list[int] | None = None) -> list[ChoiceRow]:
    indexes = indexes or list(range(len(params)))
    return [ChoiceRow(build_sampler(p), [3, 5], i) for p, i in zip(params, indexes, strict=True)]


def logits_of(seed: int, n_rows: int, spread: float = 3.0, *, is_coarse: bool = False) -> torch.Tensor:
    drawn = np.random.default_rng(seed).standard_normal((n_rows, N_VOCAB)) * spread
    return torch.from_numpy((drawn.round() if is_coarse else drawn).astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 0.8, 1.0, 5.0]),
    top_k=st.sampled_from([1, 2, 40]),
    top_p=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    is_coarse=st.booleans(),
    n_banned=st.sampled_from([0, N_VOCAB // 2, N_VOCAB - 1, N_VOCAB - 30]),
)
def test_it_chooses_the_token_that_the_specification_chooses(
    seed: int,
    index: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    is_coarse: bool,
    n_banned: int,
) -> None:
    sampled = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    rows = rows_of([sampled, SamplingParams(temperature=0), sampled], [index, 7, index + 1])
    assert all(row.sampler.native for row in rows)
    logits = logits_of(seed % 1000, 3, is_coarse=is_coarse)
    logits[0, :n_banned] = -torch.inf
    one_by_one = [HostChooser().choose(logits[i : i + 1], rows[i : i + 1]).tokens() for i in range(3)]
    assert NativeChooser().choose(logits, rows).tokens() == [token for (token,) in one_by_one]


def test_greedy_takes_the_first_of_equal_logits_in_rows_of_any_length() -> None:
    (row,) = rows_of([SamplingParams(temperature=0)])
    for n in (1, 127, 128, 129, 1000):
        for best in {0, n // 2, n - 1}:
            logits = torch.full((1, n), -2.0)
            logits[0, best:] = 0.0
            logits[0, best] = -0.0  # equal to 0
            assert NativeChooser().choose(logits, [row]).tokens() == [best]


def test_a_row_without_a_finite_logit_is_an_error_of_its_request_only() -> None:
    rows = rows_of([SamplingParams(seed=1), SamplingParams(temperature=0)] * 3)
    logits = logits_of(1, 6)
    logits[1] = -torch.inf
    logits[2, 500] = torch.nan
    logits[3, 9000] = torch.inf
    logits[4, 500] = -torch.nan
    found = NativeChooser().choose(logits, rows).tokens()
    assert [isinstance(each, int) for each in found] == [True, False, False, False, False, True]
    assert all(isinstance(each, RequestError) for each in found[1:5])
    assert "every logit is -inf" in str(found[1])
    assert "logits contain" in str(found[2])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=3, top_k=0),
        SamplingParams(seed=3, typical_p=0.9),
        SamplingParams(seed=3, repeat_penalty=1.3),
        SamplingParams(temperature=0, logit_bias={17: 100.0}),
    ],
)
def test_what_only_python_can_do_is_done_in_python(params: SamplingParams) -> None:
    rows, logits = rows_of([params, SamplingParams(seed=5)]), logits_of(4, 2)
    assert rows[0].sampler.native is None
    expected = HostChooser().choose(logits.clone(), rows).tokens()
    assert NativeChooser().choose(logits, rows).tokens() == expected


def test_rows_of_a_larger_tensor_are_found() -> None:
    rows, wide = rows_of([SamplingParams(seed=6), SamplingParams(seed=7)]), logits_of(2, 4)
    apart = wide[::2]
    assert not apart.is_contiguous()
    expected = HostChooser().choose(apart.contiguous(), rows).tokens()
    assert NativeChooser().choose(apart, rows).tokens() == expected


def test_tokens_chosen_from_a_copy_are_the_same_and_leave_the_logits_alone() -> None:
    rows, logits = rows_of([SamplingParams(seed=6), SamplingParams(temperature=0)]), logits_of(2, 2)
    before = logits.clone()
    pending = CopyingChooser().choose(logits, rows)
    assert pending.on_device is None  # the next step cannot be launched before the token is known
    assert pending.tokens() == NativeChooser().choose(before.clone(), rows).tokens()
    assert torch.equal(logits, before)
