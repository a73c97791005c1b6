"""Choose the next tokens from rows of logits.

Every step is a pure function; a `Sampler` composes them in llama.cpp's default order:

    bias, penalties │ sort, top-k │ typical, top-p, min-p, temperature │ draw
    (vocab,)        │ (vocab,) → (candidates,), descending             │ one id

The row is put in order once, and only as far as top-k needs; what follows relies on the order and takes no
second sort. A removed candidate has logit -inf; every step leaves at least one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motley.engine.params import SamplingParams
from motley.errors import RequestError

__all__ = [
    "Candidates",
    "Sampler",
    "SamplingParams",
    "add_bias",
    "build_chain",
    "build_sampler",
    "candidates",
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
_TINY = torch.finfo(torch.float32).tiny  # stands for a mass of 0, which still has to keep one candidate


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
    """Push down each token in `recent`: by the factor `repeat` (a positive logit is divided, a negative one
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
    """Of each row, the `top_k` largest logits (0: all of them) in descending order, and their token ids."""
    if top_k == 1:
        ids = rows.argmax(1, keepdim=True)
        values = rows.gather(1, ids)
    elif 0 < top_k < rows.shape[1]:
        values, ids = rows.topk(top_k)
    else:
        values, ids = rows.sort(descending=True, stable=True)
    return list(zip(values.double().cpu().numpy(), ids.cpu().numpy(), strict=True))


# --- on candidates in descending order: (candidates,) -> (candidates,) --------------------------------------
# In numpy: there are forty of them or so, for which torch takes several times as long.


def typical_p(logits: Floats, p: float) -> Floats:
    """Keep the candidates whose surprise, -log prob, is nearest to the entropy, up to a mass of `p`.

    Along a descending row the distance to the entropy first falls and then rises, so what is kept is a window
    around the nearest candidate, and two binary searches give the mass of every possible window.
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
    """Keep the fewest most likely candidates whose probabilities reach `p`."""
    n_kept = int(np.searchsorted(_softmax(logits).cumsum(), max(p, _TINY))) + 1
    return np.concatenate((logits[:n_kept], np.full(len(logits[n_kept:]), _REMOVED)))


def min_p(logits: Floats, p: float) -> Floats:
    """Keep the candidates that are at least `p` times as likely as the best one."""
    return logits if p == 0 else np.where(logits < logits.max() + math.log(p), _REMOVED, logits)


def temperature(logits: Floats, t: float) -> Floats:
    """Sharpen (t < 1) or flatten (t > 1) the distribution."""
    # Relative to the best, so that a tiny t sends the others towards -inf and not the best to +inf.
    scaled: Floats = (logits - logits.max()) / max(t, _TINY)
    return scaled


def draw(logits: Floats, uniform: float) -> int:
    """The index at which the cumulative probability passes `uniform`, in [0, 1)."""
    mass = _softmax(logits).cumsum()
    index = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    # Rounding may lift uniform * total onto the total itself, past the last candidate with any probability.
    return min(index, int(np.searchsorted(mass, mass[-1])))


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
    """Chooses a sequence's next token. Its only state is its own random generator."""

    params: SamplingParams
    chain: tuple[Transform, ...]
    generator: random.Random

    @property
    def n_candidates(self) -> int:
        """How many of the best tokens it wants to see; 0: all."""
        return 1 if self.params.is_greedy else self.params.top_k

    def shape(self, row: Tensor, history: Sequence[int]) -> Tensor:
        """Bias and penalties: the same row if there are none. `history`: the tokens so far, prompt included."""
        params = self.params
        n_recent = len(history) if params.repeat_last_n < 0 else min(params.repeat_last_n, len(history))
        return penalize(
            add_bias(row, params.logit_bias),
            history[len(history) - n_recent :],
            repeat=params.repeat_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )

    def pick(self, found: Candidates) -> int:
        """The next token's id, one of the candidates."""
        values, ids = found
        _check_best(float(values[0]))
        if self.params.is_greedy:
            return int(ids[0])
        for transform in self.chain:
            values = transform(values)
        return int(ids[draw(values, self.generator.random())])


def build_sampler(params: SamplingParams) -> Sampler:
    """A sampler for one sequence. With a seed, the same logits give the same tokens."""
    # At temperature 0 only the best token matters, and no filter can remove it.
    chain = () if params.is_greedy else build_chain(params)
    return Sampler(params, chain, random.Random(params.seed))


def shortlist(
    logits: Tensor, samplers: Sequence[Sampler], histories: Sequence[Sequence[int]]
) -> list[Candidates]:
    """What each row's sampler is to choose from. On the logits' own device: only candidates leave it."""
    given = logits.unbind()
    rows = [s.shape(row, history) for s, row, history in zip(samplers, given, histories, strict=True)]
    kinds = {sampler.n_candidates for sampler in samplers}
    if len(kinds) == 1 and all(a is b for a, b in zip(rows, given, strict=True)):
        return candidates(logits, *kinds)
    found: dict[int, Candidates] = {}
    for k in kinds:
        which = [i for i, sampler in enumerate(samplers) if sampler.n_candidates == k]
        found |= zip(which, candidates(torch.stack([rows[i] for i in which]), k), strict=True)
    return [found[i] for i in range(len(rows))]


def _check_best(best: float) -> None:
    """NaN sorts above everything, so the best logit tells the state of the whole row."""
    if math.isfinite(best):
        return
    if best == _REMOVED:
        raise RequestError(
            "no token is left to choose from: every logit is -inf",
            hint="logit_bias bans the whole vocabulary, or the model file is damaged",
        )
    raise RequestError(
        f"the model's logits contain {best}",
        hint="the model file may be damaged, or its activations overflow; try an f32 cache",
    )
