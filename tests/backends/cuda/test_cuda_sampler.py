"""Sampling on the device, under Triton's interpreter, against the CPU's: the same tokens, not only the same odds."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

sys.path.append(str(Path(__file__).parents[2] / "engine"))
from draws import follow, probabilities

from motley.backends.cuda.kernels import noise as noise_kernel
from motley.backends.cuda.kernels import sample as kernels
from motley.backends.cuda.kernels.noise import noise_of, noise_of_run
from motley.backends.cuda.sampler import CHUNK, PART, DeviceSampler, RowSettings
from motley.engine import noise
from motley.engine.choosing import ChoiceRow, GpuChooser, HostChooser, MaskingChooser, TokenOrError
from motley.engine.masking import mask_rows, masked
from motley.engine.samplers import ChainSampler
from motley.engine.sampling import SamplingParams, build_sampler
from motley.errors import RequestError

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

VOCAB = 2500  # ten chunks, the last one not whole
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
# Every way to find candidates, and every filter alone and with others.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    OFF,
    OFF | {"temperature": 0.3},
    OFF | {"top_k": 5},
    OFF | {"top_k": 7, "top_p": 0.7},
    OFF | {"top_k": 9, "typical_p": 0.6, "top_p": 0.9, "min_p": 0.01},
    OFF | {"top_k": 400},
    OFF | {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    OFF | {"top_k": 4000, "min_p": 0.2},
    OFF | {"top_p": 0.4},
    OFF | {"top_p": 0.999},  # more than the guess holds
    OFF | {"min_p": 0.1},
    OFF | {"min_p": 0.02, "top_p": 0.8, "temperature": 1.7},
    OFF | {"typical_p": 0.3},
    OFF | {"typical_p": 0.7, "top_p": 0.6, "min_p": 0.2},
    OFF | {"top_k": 1},
    OFF | {"top_p": 0.0},
    OFF | {"top_k": 6, "temperature": 1e-6},
]


class InterpretedChooser(GpuChooser):
    """The GPU's chooser, on this machine's memory."""

    def __init__(self) -> None:
        self._sampler = DeviceSampler(torch.device("cpu"))
        self._host = HostChooser()
        self._settings = {}


def random_rows(n_rows: int, seed: int, spread: float = 2.0, n_vocab: int = VOCAB) -> torch.Tensor:
    return spread * torch.randn(n_rows, n_vocab, generator=torch.Generator().manual_seed(seed))


def turns_of(
    settings: Sequence[dict[str, Any]], seed: int = 0, history: Sequence[int] = ()
) -> list[ChoiceRow]:
    samplers = [build_sampler(SamplingParams(seed=seed + i, **setting)) for i, setting in enumerate(settings)]
    return [ChoiceRow(sampler, history, i) for i, sampler in enumerate(samplers)]


def both(logits: torch.Tensor, turns: Sequence[ChoiceRow]) -> tuple[list[TokenOrError], list[TokenOrError]]:
    expected = HostChooser().choose(logits.clone(), turns).tokens()
    return expected, InterpretedChooser().choose(logits.clone(), turns).tokens()


@triton.jit
def _store_noise(ids, some, run, k0, k1, index, n: tl.constexpr):
    i = tl.arange(0, n)
    k0, k1, index = k0.to(tl.uint32), k1.to(tl.uint32), index.to(tl.uint32)
    tl.store(some + i, noise_of(tl.load(ids + i), k0, k1, index))
    tl.store(run + i, noise_of_run(0, k0, k1, index, n))


def test_the_noise_is_that_of_the_cpu() -> None:
    seed, index, n = 0x9123456789ABCDEF, 0xF0000001, 512
    ids = torch.randint(0, 2**17, (n,), dtype=torch.int32)
    some, run = torch.empty(n), torch.empty(n)
    low, high = seed & 0xFFFFFFFF, seed >> 32
    _store_noise[(1,)](ids, some, run, low, high, index, n=n)
    np.testing.assert_allclose(some, noise.gumbel(seed, index, ids.long().numpy()), atol=3e-6)
    np.testing.assert_allclose(run, noise.gumbel(seed, index, np.arange(n)), atol=3e-6)


@triton.jit
def _store_gumbel(words, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, noise_kernel.gumbel_of(tl.load(words + i).to(tl.uint32, bitcast=True)))


def test_noise_is_exact_at_both_ends() -> None:
    extremes = [0, 1, 2, 1000, 2**25, 2**26 + 3, 2**31, 2**32 - 1000, 2**32 - 2, 2**32 - 1]
    words = np.array(extremes * 2, np.uint32)[:16]
    out = torch.empty(16)
    _store_gumbel[(1,)](torch.from_numpy(words.view(np.int32)), out, n=16)
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    np.testing.assert_allclose(out, -np.log(-np.log1p(-uniform)), rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("seed", range(2))
def test_it_chooses_what_the_cpu_chooses(seed: int) -> None:
    logits, turns = random_rows(len(SETTINGS), seed), turns_of(SETTINGS, seed)
    expected, found = both(logits, turns)
    assert found == expected


def test_candidates_of_several_parts_of_a_row_are_joined() -> None:
    settings = [OFF | each for each in ({"top_k": 30, "top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.6})]
    logits = random_rows(len(settings), 5, spread=3.0, n_vocab=PART + 700)
    logits[:, : PART // 8] += 2.0  # most candidates are in the first part
    expected, found = both(logits, turns_of(settings, 2))
    assert found == expected


def test_all_ways_to_find_candidates_are_used_here() -> None:
    settings = [
        RowSettings(s["temperature"], **{k: v for k, v in s.items() if k != "temperature"}) for s in SETTINGS
    ]
    assert {row_settings.mode(VOCAB) for row_settings in settings} == set(range(6))


@pytest.mark.parametrize("seed", range(2))
def test_penalties_and_bias_are_those_of_the_cpu(seed: int) -> None:
    changes: list[dict[str, Any]] = [
        {"repeat_penalty": 1.8},
        {"frequency_penalty": 0.9, "presence_penalty": 0.4, "repeat_last_n": -1},
        {"logit_bias": {3: 4.0, 2499: 30.0, 7: -math.inf}, "temperature": 0.0},
        {"logit_bias": {5: 9.0}, "repeat_penalty": 1.5, "repeat_last_n": 3},
        {"presence_penalty": 2.0, "repeat_last_n": 0},
        {},
    ]
    logits = random_rows(len(changes), seed, n_vocab=VOCAB)
    logits[:, :8] += 6  # what is penalized is what would be chosen
    history = [5, 3, 5, 5, 1, 7, 5, 2, 2]
    turns = turns_of([OFF | {"top_k": 6} | change for change in changes], seed, history)
    expected, found = both(logits, turns)
    assert found == expected


def test_a_row_is_chosen_from_alike_in_any_batch() -> None:
    logits, turns = random_rows(len(SETTINGS), 3), turns_of(SETTINGS)
    chooser = InterpretedChooser()
    together = chooser.choose(logits.clone(), turns).tokens()
    alone = [chooser.choose(logits[i : i + 1].clone(), [turn]).tokens()[0] for i, turn in enumerate(turns)]
    backwards = chooser.choose(logits.flip(0), turns[::-1]).tokens()
    assert together == alone == backwards[::-1]


def test_more_candidates_than_are_collected_are_all_seen() -> None:
    """A flat row: nearly every token survives, so that the whole row is gone through."""
    logits = random_rows(4, 8, spread=0.05)
    settings = [OFF | {"min_p": 0.1}, OFF | {"top_p": 0.98}, OFF | {"top_k": 10}, OFF | {"typical_p": 0.9}]
    expected, found = both(logits, turns_of(settings))
    assert found == expected


@pytest.mark.parametrize("setting", [{"top_p": 0.8}, {"min_p": 0.1}, {}, {"typical_p": 0.9}])
def test_equal_logits_are_all_candidates_and_the_odds_are_right(setting: dict[str, Any]) -> None:
    logits = torch.full((30, 8), -math.inf)
    logits[:, :4] = 1.0
    drawn = InterpretedChooser().choose(logits, turns_of([OFF | setting] * 30)).tokens()
    probs = np.array([0.25] * 4 + [0.0] * 4)
    assert follow(drawn, probs)


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_of_equal_logits_top_k_takes_the_first(top_k: int) -> None:
    """Rows of 16 distinct logits again and again: more tokens than top-k share the largest one."""
    logits = random_rows(6, 4, n_vocab=16).repeat(1, 160)
    logits[3:, 200:210] += 4.0
    expected, found = both(logits, turns_of([OFF | {"top_k": top_k, "temperature": 1.5}] * 6))
    assert found == expected


@pytest.mark.parametrize("setting", [OFF, OFF | {"top_k": 4, "top_p": 0.9999999}])
@pytest.mark.parametrize(("temperature", "is_right"), [(0.5, True), (3.0, False)])
def test_draws_follow_the_distribution(setting: dict[str, Any], temperature: float, is_right: bool) -> None:
    """With filters and without; a wrong temperature is found out."""
    row, n = torch.linspace(-1, 1, 4), 60
    sampler = build_sampler(SamplingParams(seed=3, **setting | {"temperature": 0.5}))
    turns = [ChoiceRow(sampler, (), index) for index in range(n)]
    drawn = InterpretedChooser().choose(row.repeat(n, 1), turns).tokens()
    assert follow(drawn, probabilities(row.double().numpy(), temperature)) == is_right


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, OFF | {"typical_p": 0.5}])
@pytest.mark.parametrize(
    ("bad", "message"),
    [(math.nan, "logits contain"), (math.inf, "logits contain"), (None, "no token is left")],
)
def test_broken_rows_are_their_requests_errors_and_no_others(
    setting: dict[str, Any], bad: float | None, message: str
) -> None:
    logits = random_rows(3, 1)
    if bad is None:
        logits[1] = -math.inf
    else:
        logits[1, 700] = bad
    first, error, last = InterpretedChooser().choose(logits.clone(), turns_of([setting] * 3)).tokens()
    assert isinstance(error, RequestError)
    assert message in error.message
    assert all(isinstance(found, int) for found in (first, last))


def test_the_largest_peaks_bound_the_candidates_of_top_k() -> None:
    """All of the best tokens in one chunk, and each in a chunk of its own."""
    for stride in (1, CHUNK):
        logits = random_rows(1, 5, spread=0.1)
        logits[0, : 9 * stride : stride] += 5.0
        expected, found = both(logits.repeat(4, 1), turns_of([OFF | {"top_k": 9}] * 4))
        assert found == expected
        assert {int(token) // stride for token in found if isinstance(token, int)} <= set(range(9))


def test_codes_of_errors_are_no_tokens() -> None:
    assert max(kernels.NONE_LEFT, kernels.NOT_FINITE) < 0


class Fixed:
    """A matcher that allows the same tokens always."""

    is_complete = False

    def __init__(self, ids: Sequence[int], n_vocab: int = VOCAB) -> None:
        bits = np.zeros(-(-n_vocab // 32) * 32, dtype=np.uint8)
        bits[list(ids)] = 1
        self.words = np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self) -> np.ndarray:
        return self.words

    def accept(self, token: int) -> None:
        raise AssertionError("choosing does not advance a matcher")

    def forced(self) -> list[int]:
        return []


@pytest.mark.parametrize("n_allowed", [1, 2, 5, 300])
def test_constrained_rows_choose_among_allowed_tokens_as_on_the_cpu(n_allowed: int) -> None:
    rng = np.random.default_rng(n_allowed)
    logits = random_rows(len(SETTINGS) + 1, seed=n_allowed)
    allowed = [rng.choice(VOCAB, n_allowed, replace=False) for _ in SETTINGS]
    rows = [
        ChoiceRow(row.sampler, row.history, row.index, Fixed(ids))
        for row, ids in zip(turns_of(SETTINGS, seed=7), allowed, strict=True)
    ]
    rows += turns_of([OFF], seed=99)  # a free row among them
    expected = MaskingChooser(HostChooser()).choose(logits.clone(), rows).tokens()
    assert MaskingChooser(InterpretedChooser()).choose(logits.clone(), rows).tokens() == expected
    assert all(token in ids for token, ids in zip(expected, allowed, strict=False))
    assert expected[-1] == HostChooser().choose(logits[-1:], rows[-1:]).tokens()[0]


def test_a_gpu_expands_masks_as_the_cpu_does() -> None:
    rows, n_known = random_rows(2, seed=1, n_vocab=100), 70  # the vocabulary ends before the model's rows do
    matchers = [Fixed([0, 31, 32, 69], n_known), Fixed([5], n_known)]
    words = torch.from_numpy(np.stack([matcher.words for matcher in matchers]))
    here = rows.clone()
    mask_rows(here, [ChoiceRow(turns_of([OFF])[0].sampler, (), 0, matcher) for matcher in matchers])
    assert torch.equal(masked(rows, words), here)
    assert torch.isfinite(here).nonzero().tolist() == [[0, 0], [0, 31], [0, 32], [0, 69], [1, 5]]


def test_samplers_that_a_gpu_does_not_have_run_on_the_host() -> None:
    params = SamplingParams(seed=1, mirostat=2)
    plain = build_sampler(params)
    rows = [ChoiceRow(ChainSampler(params, plain.chain, plain.key), [], 0), *turns_of([OFF])]
    logits = random_rows(2, seed=3)
    expected = HostChooser().choose(logits.clone(), rows).tokens()
    assert InterpretedChooser().choose(logits.clone(), rows).tokens() == expected


def test_logprobs_of_a_gpus_choice_are_those_of_the_row_before_it_was_edited() -> None:
    settings = [
        OFF | {"logprobs": 3, "logit_bias": {4: 9.0}},
        OFF,
        OFF | {"logprobs": 1, "post_sampling_probs": True},
    ]
    logits, rows = random_rows(3, seed=5), turns_of(settings)
    found = []
    for chooser in (HostChooser(), InterpretedChooser()):
        pending = MaskingChooser(chooser).choose(logits.clone(), rows)
        tokens = pending.tokens()
        assert pending.logprobs is not None
        found.append(pending.logprobs(tokens))
    assert found[0] == found[1]
    assert sorted(found[0]) == [0, 2]
    wanted = torch.log_softmax(logits[0].double(), 0)
    assert found[0][0].logprob == pytest.approx(float(wanted[found[0][0].token]), abs=1e-5)
    assert [token for token, _ in found[0][0].top] == wanted.topk(3).indices.tolist()
