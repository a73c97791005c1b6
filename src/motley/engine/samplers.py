"""Samplers beyond the usual chain: top-n-sigma, xtc, dynamic temperature, mirostat, dry, and another order of filters.

A `ChainSampler` takes all candidates, not only the `top_k` best, and runs on the host. It has no state but mirostat's,
which is kept by index, so that a token that is chosen again after a failed step is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from motley.engine.checks import MAX_BIAS
from motley.engine.noise import words
from motley.engine.params import SAMPLERS, SamplingParams
from motley.engine.sampling import (
    Candidates,
    Floats,
    Sampler,
    build_sampler,
    min_p,
    temperature,
    top_p,
    typical_p,
)
from motley.text import Tokenizer

_REMOVED = -math.inf
_XTC_TOKEN = 2**31 - 1  # the random number of this token id, which no vocabulary has, decides on xtc
_MIROSTAT_TOKENS = 100  # likeliest tokens that mirostat 1 estimates the distribution from


def needs_chain_sampler(params: SamplingParams) -> bool:
    """Whether a request uses anything that the usual sampler does not have."""
    is_plain_order = params.samplers == SAMPLERS
    is_on = (
        params.top_n_sigma > 0
        or params.xtc_probability > 0
        or params.dynatemp_range > 0
        or params.mirostat > 0
        or params.dry_multiplier > 0
        or params.min_keep > 1
    )
    return (not params.is_greedy and (is_on or not is_plain_order)) or params.dry_multiplier > 0


# --- filters: (candidates,), descending → the same, some of them -inf ---------------------------------------


def top_k(logits: Floats, k: int) -> Floats:
    """Keeps the `k` best; 0: all."""
    return logits if k == 0 else np.concatenate((logits[:k], np.full(len(logits[k:]), _REMOVED)))


def top_n_sigma(logits: Floats, n: float) -> Floats:
    """Keeps logits within `n` standard deviations of the best one; n <= 0: all."""
    if n <= 0:
        return logits
    finite = logits[logits != _REMOVED]
    return np.where(logits < finite[0] - n * finite.std(), _REMOVED, logits)


def xtc(logits: Floats, threshold: float) -> Floats:
    """Removes all candidates of at least `threshold` probability, except for the least likely of them."""
    n_top = int((_softmax(logits) >= threshold).sum())
    if threshold > 0.5 or n_top < 2:
        return logits
    return np.concatenate((np.full(n_top - 1, _REMOVED), logits[n_top - 1 :]))


def dynamic_temperature(logits: Floats, t: float, spread: float, exponent: float) -> Floats:
    """A temperature from t - spread (certain) to t + spread (all alike), by the entropy of the candidates."""
    low, high = max(0.0, t - spread), t + spread
    n_left = int((logits != _REMOVED).sum())
    if n_left <= 1:
        return logits
    probs = _softmax(logits)
    probs = probs[probs > 0]
    entropy = -float((probs * np.log(probs)).sum()) / math.log(n_left)
    return temperature(logits, low + (high - low) * max(0.0, min(1.0, entropy)) ** exponent)


def mirostat_2(logits: Floats, mu: float) -> Floats:
    """Keeps the candidates whose surprise, -log2 prob, is at most `mu`; at least the best one."""
    surprise = -np.log2(np.maximum(_softmax(logits), np.finfo(np.float64).tiny))
    kept = np.where(surprise > mu, _REMOVED, logits)
    kept[0] = logits[0]
    return kept


def mirostat_1(logits: Floats, mu: float, n_vocab: int) -> Floats:
    """Keeps as many candidates as a Zipf distribution with the row's exponent needs for a surprise of `mu`."""
    probs = _softmax(logits)[:_MIROSTAT_TOKENS]
    probs = probs[probs > 0]
    if len(probs) < 2:
        return logits
    t = np.log(np.arange(2, len(probs) + 1) / np.arange(1, len(probs)))
    b = np.log(probs[:-1] / probs[1:])
    s = max(float((t * b).sum() / (t * t).sum()), 1e-6)
    e = s - 1
    base = e * 2**mu / (1 - n_vocab**-e) if abs(e) > 1e-9 else 2**mu / math.log(n_vocab)
    return top_k(logits, max(1, int(math.exp(min(math.log(max(base, 1.0)) / s, 20)))))


def dry_penalties(
    history: Sequence[int], *, multiplier: float, base: float, allowed: int, breakers: Collection[int]
) -> dict[int, float]:
    """The penalty of each token that would continue a repetition of the history's end; subtracted from its logit.

    A token that followed an earlier occurrence of the last `n` tokens costs multiplier · base ** (n - allowed), for
    the largest such `n` >= allowed. A repetition does not extend over a breaker.
    """
    backwards = history[::-1]
    n_free = next((i for i, token in enumerate(backwards) if token in breakers), len(backwards))
    longest: dict[int, int] = {}
    for i, n_equal in enumerate(_common_prefixes(backwards)):
        if i and backwards[i - 1] not in breakers:
            n = min(n_equal, n_free)
            longest[backwards[i - 1]] = max(n, longest.get(backwards[i - 1], 0))
    found = {token: n for token, n in longest.items() if n >= max(1, allowed)}
    return {token: _dry_cost(multiplier, base, n - allowed) for token, n in found.items()}


def _dry_cost(multiplier: float, base: float, n_beyond: int) -> float:
    try:
        cost = multiplier * base ** min(n_beyond, 200)
    except OverflowError:  # Python's floats raise it for powers alone; a product is inf, or NaN for 0 * inf
        return MAX_BIAS
    return min(cost, MAX_BIAS)


def _common_prefixes(tokens: Sequence[int]) -> list[int]:
    """How many tokens from each position on equal those of the beginning (the Z function, in linear time)."""
    lengths, left, right = [0] * len(tokens), 0, 0
    for i in range(1, len(tokens)):
        n = min(right - i, lengths[i - left]) if i < right else 0
        while i + n < len(tokens) and tokens[n] == tokens[i + n]:
            n += 1
        lengths[i] = n
        if i + n > right:
            left, right = i, i + n
    return lengths


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    probs: Floats = weights / weights.sum()
    return probs


# --- composition --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainSampler(Sampler):
    """A sampler with any filters in any order."""

    breakers: frozenset[int] = frozenset()  # tokens that end a repetition for dry
    mu: dict[int, float] = field(default_factory=dict)  # mirostat's state before each index of the answer

    @property
    def n_candidates(self) -> int:
        """1 if greedy. Otherwise 0, which means all: filters before top-k see the whole row."""
        return 1 if self.params.is_greedy else 0

    @property
    def is_shaping(self) -> bool:
        return super().is_shaping or self.has_dry

    @property
    def has_state(self) -> bool:
        return self.params.mirostat > 0

    @property
    def native(self) -> None:
        return None

    @property
    def has_dry(self) -> bool:
        return self.params.dry_multiplier > 0 and "dry" in self.params.samplers

    def shape(self, row: Tensor, history: Sequence[int]) -> Tensor:
        row = super().shape(row, history)
        if not self.has_dry:
            return row
        params = self.params
        n_last = params.dry_penalty_last_n
        costs = dry_penalties(
            list(history if n_last < 0 else history[max(0, len(history) - n_last) :]),
            multiplier=params.dry_multiplier,
            base=params.dry_base,
            allowed=params.dry_allowed_length,
            breakers=self.breakers,
        )
        if not costs:
            return row
        ids = torch.tensor(list(costs), device=row.device)
        values = torch.tensor([-cost for cost in costs.values()], dtype=row.dtype, device=row.device)
        return row.index_add(0, ids, values)

    def pick(self, found: Candidates, index: int) -> int:
        chosen = super().pick(found, index)
        if self.params.mirostat and not self.params.is_greedy:
            values, ids = self.distribution(found, index)
            prob = float(_softmax(values)[ids == chosen][0])
            error = -math.log2(max(prob, 1e-300)) - self.params.mirostat_tau
            self.mu[index + 1] = self._mu(index) - self.params.mirostat_eta * error
        return chosen

    def filtered(self, values: Floats, index: int) -> Floats:
        """The logits after all filters, which see each other's results in the order of `samplers`."""
        if self.params.mirostat:
            values = temperature(values, self.params.temperature)
            mu = self._mu(index)
            return (
                mirostat_2(values, mu) if self.params.mirostat == 2 else mirostat_1(values, mu, len(values))
            )
        steps = self._steps(index)
        left, result = np.arange(len(values)), np.full(len(values), _REMOVED)
        for name in self.params.samplers:
            if name in steps:
                after = steps[name](values)
                after = after if name == "temperature" else self._with_enough(values, after)
                kept = after != _REMOVED
                values, left = after[kept], left[kept]
        result[left] = values
        return result

    def _steps(self, index: int) -> dict[str, Callable[[Floats], Floats]]:
        p = self.params
        return {
            "top_n_sigma": lambda v: top_n_sigma(v, p.top_n_sigma),
            "top_k": lambda v: top_k(v, p.top_k),
            "typ_p": lambda v: typical_p(v, p.typical_p) if p.typical_p < 1 else v,
            "top_p": lambda v: top_p(v, p.top_p) if p.top_p < 1 else v,
            "min_p": lambda v: min_p(v, p.min_p),
            "xtc": lambda v: xtc(v, p.xtc_threshold) if self._uniform(index) < p.xtc_probability else v,
            "temperature": lambda v: (
                dynamic_temperature(v, p.temperature, p.dynatemp_range, p.dynatemp_exponent)
                if p.dynatemp_range > 0
                else temperature(v, p.temperature)
            ),
        }

    def _with_enough(self, before: Floats, after: Floats) -> Floats:
        """`after`, or the best `min_keep` candidates of `before` if fewer are left."""
        n_least = min(self.params.min_keep, len(before))
        return after if int((after != _REMOVED).sum()) >= n_least else top_k(before, n_least)

    def _uniform(self, index: int) -> float:
        """A number from 0 to 1 that depends on seed and index only."""
        return (float(words(self.key, index, np.array([_XTC_TOKEN]))[0]) + 0.5) * 2.0**-32

    def _mu(self, index: int) -> float:
        return max(-1000.0, min(1000.0, self.mu.get(index, 2 * self.params.mirostat_tau)))


class SamplerFactory:
    """Makes a request's sampler: the usual one, which a GPU has too, if that is enough. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._latest: tuple[tuple[str, ...], frozenset[int]] = (), frozenset()

    def make(self, params: SamplingParams) -> Sampler:
        plain = build_sampler(params)
        if not needs_chain_sampler(params):
            return plain
        breakers = self._breakers(params.dry_sequence_breakers) if params.dry_multiplier > 0 else frozenset()
        return ChainSampler(params, plain.chain, plain.key, breakers)

    def _breakers(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Tokens that contain one of these texts, and all tokens without text."""
        known, ids = self._latest
        if known != texts or not ids:
            tokens, wanted = self._tokenizer, [text.encode(errors="surrogatepass") for text in texts]
            pieces = ((i, tokens.token_bytes(i)) for i in range(tokens.n_vocab))
            found = {i for i, piece in pieces if any(text in piece for text in wanted)}
            ids = frozenset(found | tokens.control_ids)
            self._latest = texts, ids
        return ids
