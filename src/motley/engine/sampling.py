"""Choose the next token from one row of logits.

Every step is a pure function; a `Sampler` composes them in llama.cpp's default order:

    bias, penalties │ sort, top-k │ typical, top-p, min-p, temperature │ draw
    (vocab,)        │ (vocab,) → (candidates,), descending             │ one id

The row is put in order once, and only as far as top-k needs; what follows relies on the order and takes no
second sort. A removed candidate has logit -inf; every step leaves at least one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from motley.engine.params import SamplingParams
from motley.errors import RequestError

__all__ = [
    "Sampler",
    "SamplingParams",
    "add_bias",
    "build_chain",
    "build_sampler",
    "candidates",
    "draw",
    "min_p",
    "penalize",
    "temperature",
    "top_p",
    "typical_p",
]

Transform = Callable[[Tensor], Tensor]  # (candidates,) float32, descending -> the same, some of them -inf

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


# --- from the row to candidates -----------------------------------------------------------------------------


def candidates(logits: Tensor, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """The `top_k` largest logits (0: all of them) in descending order, and their token ids."""
    n_vocab = logits.shape[0]
    if 0 < top_k < n_vocab:
        values, ids = logits.topk(top_k)
    else:
        values, ids = logits.sort(descending=True, stable=True)
    return values, ids


# --- on candidates in descending order: (candidates,) -> (candidates,) --------------------------------------


def typical_p(logits: Tensor, p: float) -> Tensor:
    """Keep the candidates whose surprise, -log prob, is nearest to the entropy, up to a mass of `p`.

    Along a descending row the distance to the entropy first falls and then rises, so what is kept is a window
    around the nearest candidate, and two binary searches give the mass of every possible window.
    """
    log_probs = logits.log_softmax(0)
    probs = log_probs.exp()
    entropy = torch.special.entr(probs).sum()
    distance = (log_probs + entropy).abs()
    nearest = int(distance.argmin())
    n_before = torch.searchsorted(distance[:nearest].flip(0), distance, right=True)
    n_after = torch.searchsorted(distance[nearest:], distance, right=True)
    mass_upto = torch.nn.functional.pad(probs.cumsum(0), (1, 0))  # (candidates + 1,)
    mass = mass_upto[nearest + n_after] - mass_upto[nearest - n_before]
    widest = torch.where(mass >= max(p, _TINY), distance, math.inf).min()
    return logits.masked_fill(distance > widest, _REMOVED)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest most likely candidates whose probabilities reach `p`."""
    mass = logits.softmax(0).cumsum(0)
    n_kept = int(torch.searchsorted(mass, max(p, _TINY))) + 1
    return torch.cat((logits[:n_kept], torch.full_like(logits[n_kept:], _REMOVED)))


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep the candidates that are at least `p` times as likely as the best one."""
    if p == 0:
        return logits
    return logits.masked_fill(logits < logits.max() + math.log(p), _REMOVED)


def temperature(logits: Tensor, t: float) -> Tensor:
    """Sharpen (t < 1) or flatten (t > 1) the distribution."""
    # Relative to the best, so that a tiny t sends the others to -inf and not the best to +inf.
    return (logits - logits.max()) / max(t, _TINY)


def draw(logits: Tensor, uniform: float) -> int:
    """The index at which the cumulative probability passes `uniform`, in [0, 1)."""
    mass = logits.softmax(0, dtype=torch.float64).cumsum(0)
    index = int(torch.searchsorted(mass, uniform * mass[-1], right=True))
    # Rounding may lift uniform * total onto the total itself, past the last candidate with any probability.
    return min(index, int(torch.searchsorted(mass, mass[-1])))


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
    """`sampler(logits, history)` is the next token's id. Its only state is its own random generator."""

    params: SamplingParams
    chain: tuple[Transform, ...]
    generator: torch.Generator

    def __call__(self, logits: Tensor, history: Sequence[int]) -> int:
        """`logits`: (vocab,) float32; `history`: the tokens so far, prompt included."""
        row = self._shape(logits, history)
        if self.params.is_greedy:
            best = int(row.argmax())
            _check_best(float(row[best]))
            return best
        values, ids = candidates(row, self.params.top_k)
        _check_best(float(values[0]))
        for transform in self.chain:
            values = transform(values)
        return int(ids[draw(values, self._uniform())])

    def _shape(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        params = self.params
        n_recent = len(history) if params.repeat_last_n < 0 else min(params.repeat_last_n, len(history))
        return penalize(
            add_bias(logits, params.logit_bias),
            history[len(history) - n_recent :],
            repeat=params.repeat_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))


def build_sampler(params: SamplingParams) -> Sampler:
    """A sampler for one sequence. With a seed, the same logits give the same tokens."""
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    # At temperature 0 only the best token matters, and no filter can remove it.
    return Sampler(params, () if params.is_greedy else build_chain(params), generator)


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
