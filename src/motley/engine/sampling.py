"""Chooses the next tokens from rows of logits.

Every step is a pure function; a `Sampler` composes them in llama.cpp's default order:

    bias, penalties │ sort, top-k │ typical, top-p, min-p, temperature │ draw
    (vocab,)        │ (vocab,) → (candidates,), descending             │ one id

The row is sorted once, and only as far as top-k needs; the later steps rely on this order and do not sort again.
A removed candidate has logit -inf; every step leaves at least one.

The draw is the argmax of logit + Gumbel noise, and the noise is a function of (seed, index of the token in its answer,
token id): see `noise`. So the choice does not depend on the order of candidates, on the batch or on the device. This
module is the specification; `backends.cpu.sampler` does the same in native code and `backends.cuda.sampler` on a GPU.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motley.backends import row_settings
from motley.engine.noise import gumbel
from motley.engine.params import SamplingParams
from motley.errors import RequestError
from motley.runtime.best import STRETCH, largest

__all__ = [
    "Candidates",
    "Sampler",
    "SamplingParams",
    "add_bias",
    "build_chain",
    "build_sampler",
    "candidates",
    "check_best",
    "draw",
    "min_p",
    "penalize",
    "shortlist",
    "temperature",
    "top_p",
    "typical_p",
]

Floats = npt.NDArray[np.float64]
Candidates = tuple[Floats, npt.NDArray[np.int64]]  # logits in descending order, and the ids of their tokens
Transform = Callable[[Floats], Floats]  # (candidates,), descending -> the same, some of them -inf

_REMOVED = float("-inf")
_TINY = torch.finfo(torch.float32).tiny  # replaces a mass of 0, so that one candidate is kept


# --- on the whole row: (vocab,) -> (vocab,) -----------------------------------------------------------------


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """logit[id] + bias[id]."""
    if not bias:
        return logits
    n_vocab = logits.shape[0]
    if (highest := max(bias)) >= n_vocab:
        raise RequestError(
            f"logit_bias: token id {highest} is not in the vocabulary of {n_vocab} tokens",
            hint=f"token ids go from 0 to {n_vocab - 1}",
        )
    ids = torch.tensor(list(bias), device=logits.device)
    values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, ids, values)


def penalize(
    logits: Tensor,
    recent: Sequence[int],
    *,
    repeat: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Tensor:
    """Lowers the logit of each token in `recent`: by the factor `repeat` (a positive logit is divided, a negative one
    multiplied), then by `frequency` for each occurrence and by `presence` once.
    """
    if not recent or (repeat == 1 and frequency == 0 and presence == 0):
        return logits
    ids, counts = torch.unique(torch.tensor(recent, device=logits.device), return_counts=True)
    seen = logits[ids]
    seen = torch.where(seen > 0, seen / repeat, seen * repeat)
    return logits.index_copy(0, ids, seen - counts * frequency - presence)


# --- from rows to candidates --------------------------------------------------------------------------------


def candidates(rows: Tensor, top_k: int = 0) -> list[Candidates]:
    """For each row, the `top_k` largest logits (0: all of them) in descending order, and their token ids."""
    if rows.device.type == "cpu" and 0 < top_k <= rows.shape[1] // (2 * STRETCH):
        # Not `rows.numpy()`: after it, torch cannot resize the memory of activations.
        shared: npt.NDArray[np.float32] = np.from_dlpack(rows)  # type: ignore[assignment]
        found = zip(shared, largest(shared, top_k), strict=True)
        return [(row[ids].astype(np.float64), ids) for row, ids in found]
    if top_k == 1:
        ids = rows.argmax(1, keepdim=True)
        values = rows.gather(1, ids)
    elif 0 < top_k < rows.shape[1]:
        values, ids = rows.topk(top_k)
    else:
        values, ids = rows.sort(descending=True, stable=True)
    return list(zip(values.double().cpu().numpy(), ids.cpu().numpy(), strict=True))


# --- on candidates in descending order: (candidates,) -> (candidates,) --------------------------------------
# In numpy: there are about forty candidates, and for so few torch takes several times as long.


def typical_p(logits: Floats, p: float) -> Floats:
    """Keeps the candidates whose surprise, -log prob, is nearest to the entropy, up to a mass of `p`.

    Along a descending row the distance to the entropy first falls and then rises, so the kept candidates are a window
    around the nearest one, and two binary searches give the mass of every possible window.
    """
    probs = _softmax(logits)
    surprise = -np.log(np.maximum(probs, _TINY))
    distance = np.abs(surprise - (probs * surprise).sum())
    nearest = int(distance.argmin())
    n_before = np.searchsorted(distance[:nearest][::-1], distance, side="right")
    n_after = np.searchsorted(distance[nearest:], distance, side="right")
    mass_upto = np.concatenate(([0.0], probs.cumsum()))  # (candidates + 1,)
    mass = mass_upto[nearest + n_after] - mass_upto[nearest - n_before]
    widest = distance[mass >= max(p, _TINY)].min(initial=math.inf)
    return np.where(distance > widest, _REMOVED, logits)


def top_p(logits: Floats, p: float) -> Floats:
    """Keeps the smallest set of most likely candidates whose probabilities sum to at least `p`."""
    n_kept = int(np.searchsorted(_softmax(logits).cumsum(), max(p, _TINY))) + 1
    return np.concatenate((logits[:n_kept], np.full(len(logits[n_kept:]), _REMOVED)))


def min_p(logits: Floats, p: float) -> Floats:
    """Keeps the candidates that are at least `p` times as likely as the best one."""
    return logits if p == 0 else np.where(logits < logits.max() + math.log(p), _REMOVED, logits)


def temperature(logits: Floats, t: float) -> Floats:
    """Divides the logits by `t`: t < 1 sharpens the distribution, t > 1 flattens it."""
    # Relative to the best logit: with a tiny t the others go towards -inf, and the best does not overflow to +inf.
    scaled: Floats = (logits - logits.max()) / max(t, _TINY)
    return scaled


def draw(logits: Floats, noise: Floats) -> int:
    """The index of the largest logit + noise: with Gumbel noise, a draw from the softmax of the logits."""
    return int((logits + noise).argmax())


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    probs: Floats = weights / weights.sum()
    return probs


# --- composition --------------------------------------------------------------------------------------------


def build_chain(params: SamplingParams) -> tuple[Transform, ...]:
    """The filters that `params` turns on, in llama.cpp's order, and the temperature."""
    chain: list[Transform] = []
    if params.typical_p < 1:
        chain.append(partial(typical_p, p=params.typical_p))
    if params.top_p < 1:
        chain.append(partial(top_p, p=params.top_p))
    if params.min_p > 0:
        chain.append(partial(min_p, p=params.min_p))
    if params.temperature != 1:
        chain.append(partial(temperature, t=params.temperature))
    return tuple(chain)


@dataclass(frozen=True)
class Sampler:
    """Chooses a sequence's tokens. It has no state: the same logits, history and index give the same token."""

    params: SamplingParams
    chain: tuple[Transform, ...]
    key: int  # of the random numbers: 64 bits

    @property
    def n_candidates(self) -> int:
        """How many of the largest logits it needs; 0: all."""
        return 1 if self.params.is_greedy else self.params.top_k

    def recent(self, history: Sequence[int]) -> Sequence[int]:
        """The tokens that penalties count; empty if every penalty is off."""
        params = self.params
        if not params.has_penalties:
            return ()
        n_recent = len(history) if params.repeat_last_n < 0 else min(params.repeat_last_n, len(history))
        return history[len(history) - n_recent :]

    @property
    def is_shaping(self) -> bool:
        """Whether it has a bias or a penalty."""
        return bool(self.params.logit_bias) or self.params.has_penalties

    @property
    def has_state(self) -> bool:
        """Whether a choice depends on the choices before it, beyond the history: no row can be chosen ahead of them."""
        return False

    @cached_property
    def native(self) -> Any | None:
        """Settings for the native core, which chooses all rows of a step at once; None: only this module can choose."""
        params = self.params
        if self.is_shaping or (params.typical_p < 1 and not params.is_greedy):
            return None
        return row_settings(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            key=self.key,
        )

    def shape(self, row: Tensor, history: Sequence[int]) -> Tensor:
        """The row with bias and penalties applied; the same row if there are none. `history`: prompt and answer."""
        params = self.params
        return penalize(
            add_bias(row, params.logit_bias),
            self.recent(history),
            repeat=params.repeat_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )

    def pick(self, found: Candidates, index: int) -> int:
        """The id that is drawn from the candidates. `index`: of the token in its answer, from 0."""
        values, ids = self.distribution(found, index)
        if len(ids) == 1:
            return int(ids[0])
        return int(ids[draw(values, gumbel(self.key, index, ids))])

    def distribution(self, found: Candidates, index: int) -> Candidates:
        """The candidates that all filters leave, and their logits: the draw is from their softmax."""
        values, ids = found
        check_best(float(values[0]))
        if self.params.is_greedy:
            return values[:1], ids[:1]
        values = self.filtered(values, index)
        kept = np.flatnonzero(values != _REMOVED)
        return values[kept], ids[kept]

    def filtered(self, values: Floats, index: int) -> Floats:
        """The logits after all filters; -inf for candidates that one of them removed."""
        for transform in self.chain:
            values = transform(values)
        return values


def build_sampler(params: SamplingParams) -> Sampler:
    """A sampler for one sequence. Without a seed in `params`, it gets a random one."""
    # At temperature 0 only the best token matters, and no filter can remove it.
    chain = () if params.is_greedy else build_chain(params)
    return Sampler(params, chain, secrets.randbits(64) if params.seed is None else params.seed)


def shortlist(
    logits: Tensor, samplers: Sequence[Sampler], histories: Sequence[Sequence[int]]
) -> list[Candidates]:
    """The candidates for each row's sampler. Computed on the logits' device: only candidates are copied to the host."""
    kinds = {sampler.n_candidates for sampler in samplers}
    if len(kinds) == 1 and not any(sampler.is_shaping for sampler in samplers):
        return candidates(logits, *kinds)
    rows = [
        s.shape(row, history) for s, row, history in zip(samplers, logits.unbind(), histories, strict=True)
    ]
    found: dict[int, Candidates] = {}
    for k in kinds:
        which = [i for i, sampler in enumerate(samplers) if sampler.n_candidates == k]
        found |= zip(which, candidates(torch.stack([rows[i] for i in which]), k), strict=True)
    return [found[i] for i in range(len(rows))]


def check_best(best: float) -> None:
    """Raises if the best logit is not finite. NaN sorts above all numbers, so this checks the whole row."""
    if math.isfinite(best):
        return
    if best == _REMOVED:
        raise RequestError(
            "no token is left to choose from: every logit is -inf",
            hint="logit_bias bans every token that is allowed, or the model file is damaged",
        )
    raise RequestError(
        f"the model's logits contain {best}",
        hint="the model file may be damaged, or its activations overflow; try an f32 cache",
    )
