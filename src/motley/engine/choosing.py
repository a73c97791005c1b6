"""Chooses the next token of each request from the logits of a batch, on the device of the logits.

    chooser = chooser_for(device)
    pending = chooser.choose(logits, rows)    # a GPU begins; the host may do something else meanwhile
    for row, found in zip(rows, pending.tokens(), strict=True): …    # a token id, or the request's own error

On the CPU this uses the native core, or `sampling` for what the core does not have, on a GPU `backends.gpu`, with the
same random numbers. All draw from the same
distribution; if two scores are equal or differ by less than float32's precision, they may choose differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from motley.backends import NONE_LEFT, choose_rows
from motley.engine.logprobs import RawRows, SampledRows
from motley.engine.masking import mask_rows
from motley.engine.request import TokenLogprobs
from motley.engine.samplers import ChainSampler
from motley.engine.sampling import Sampler, check_best, shortlist
from motley.grammar import Matcher

if TYPE_CHECKING:
    from motley.backends.gpu import RowSettings

_MAX_SETTINGS = 4096  # requests whose settings are kept for the GPU

TokenOrError = int | BaseException  # a token, or the error of its request


@dataclass(frozen=True)
class Pending:
    """Tokens that are being computed."""

    tokens: Callable[[], list[TokenOrError]]  # waits for them
    on_device: torch.Tensor | None = None  # int32, if a GPU chooses: input of the next step
    # Of the tokens, by row, if any request needs log-probabilities.
    logprobs: Callable[[Sequence[TokenOrError]], dict[int, TokenLogprobs]] | None = None


@dataclass(slots=True)  # not frozen: that takes three times as long to make, and there is one for each token
class ChoiceRow:
    """A request that gets a token in this step."""

    sampler: Sampler
    history: Sequence[int]  # its tokens so far, prompt included
    index: int  # of the token in its answer, from 0
    matcher: Matcher | None = None  # what its answer must match, after the tokens so far
    banned: frozenset[int] = frozenset()  # tokens that it may not get yet

    @property
    def is_special(self) -> bool:
        """Whether it has a constraint or needs log-probabilities."""
        return self.matcher is not None or bool(self.banned) or self.sampler.params.logprobs is not None


def n_needed(rows: Sequence[ChoiceRow]) -> int:
    """How many of the largest logits of each row are enough to choose from; 0: all."""
    counts = [0 if row.is_special or row.sampler.is_shaping else row.sampler.n_candidates for row in rows]
    return max(counts, default=0) if all(counts) else 0


class Chooser(Protocol):
    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        """Starts to choose a token for each row of `logits`. May overwrite `logits`."""
        ...

    def settings(self, rows: Sequence[ChoiceRow]) -> list[Any] | None:
        """The settings of each row, as for `choose_rows`: with them a native call can run a batch and choose as this
        chooser does. None: it cannot.
        """
        return None


def checked(found: Sequence[int]) -> list[TokenOrError]:
    """The tokens of native samplers, with an error where they give a number that means one."""
    return [number if number >= 0 else _or_error(_token, number) for number in found]


def chooser_for(device: torch.device, *, on_host: bool = False) -> Chooser:
    """The chooser for logits on `device`. `on_host`: it chooses on the CPU, from a copy of a GPU's logits."""
    if device.type != "cuda":
        return MaskingChooser(NativeChooser())
    return MaskingChooser(CopyingChooser() if on_host else GpuChooser(device))


class MaskingChooser(Chooser):
    """Applies constraints before another chooser chooses, and keeps what log-probabilities need."""

    def __init__(self, inner: Chooser) -> None:
        self._inner = inner

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        if not any(row.is_special for row in rows):
            return self._inner.choose(logits, rows)
        raw = RawRows(logits, rows)
        faults = mask_rows(logits, rows)
        sampled = SampledRows(logits, rows)
        chosen = self._inner.choose(logits, rows)

        def tokens() -> list[TokenOrError]:
            return [faults.get(i, found) for i, found in enumerate(chosen.tokens())]

        def logprobs(found: Sequence[TokenOrError]) -> dict[int, TokenLogprobs]:
            return raw.entries(found) | sampled.entries(found)

        return Pending(tokens, chosen.on_device, logprobs)

    def settings(self, rows: Sequence[ChoiceRow]) -> list[Any] | None:
        if any(row.is_special for row in rows):
            return None
        return self._inner.settings(rows)


class HostChooser(Chooser):
    """Chooses on the CPU, as `sampling` specifies."""

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        lists = shortlist(logits, [row.sampler for row in rows], [row.history for row in rows])

        def found() -> list[TokenOrError]:
            return [
                _or_error(row.sampler.pick, each, row.index) for row, each in zip(rows, lists, strict=True)
            ]

        return Pending(found)


class NativeChooser(Chooser):
    """Chooses on the CPU with one native call for all rows; as `HostChooser` if a row's sampler needs Python."""

    def __init__(self) -> None:
        self._host = HostChooser()

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        settings = [row.sampler.native for row in rows]
        if not all(settings):
            return self._host.choose(logits, rows)
        found = choose_rows(logits, settings, [row.index for row in rows])
        return Pending(lambda: checked(found))

    def settings(self, rows: Sequence[ChoiceRow]) -> list[Any] | None:
        settings = [row.sampler.native for row in rows]
        return settings if all(settings) else None


class CopyingChooser(Chooser):
    """Chooses on the CPU, from a copy of a GPU's logits: while the GPU's samplers are being compiled."""

    def __init__(self) -> None:
        self._native = NativeChooser()

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        return self._native.choose(logits.cpu(), rows)


class GpuChooser(Chooser):
    """Chooses on a GPU, for all rows at once; only token ids are copied to the host. Needs Triton."""

    def __init__(self, device: torch.device) -> None:
        from motley.backends.gpu import DeviceSampler

        self._sampler = DeviceSampler(device)
        self._host = HostChooser()
        self._settings: dict[int, tuple[Sampler, RowSettings]] = {}  # of samplers, by id(sampler)

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        if any(isinstance(row.sampler, ChainSampler) for row in rows):
            return self._host.choose(logits, rows)
        pending = self._sampler.launch(
            logits,
            [self._settings_of(row.sampler) for row in rows],
            [row.index for row in rows],
            {i: recent for i, row in enumerate(rows) if (recent := row.sampler.recent(row.history))},
            {i: bias for i, row in enumerate(rows) if (bias := row.sampler.params.logit_bias)},
        )
        return Pending(
            lambda: [_or_error(_token, number) for number in pending.ids()], self._sampler.chosen(len(rows))
        )

    def _settings_of(self, sampler: Sampler) -> RowSettings:
        """A sampler's settings for the GPU. They are kept, because a request needs many tokens."""
        known = self._settings.get(id(sampler))
        if known is not None and known[0] is sampler:
            return known[1]
        from motley.backends.gpu import RowSettings

        if len(self._settings) >= _MAX_SETTINGS:
            self._settings.clear()
        params = sampler.params
        settings = RowSettings(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            repeat=params.repeat_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            key=sampler.key,
        )
        self._settings[id(sampler)] = sampler, settings
        return settings


def _token(number: int) -> int:
    """The token; raises for what samplers give instead of one."""
    if number < 0:
        check_best(float("-inf") if number == NONE_LEFT else float("nan"))
    return number


def _or_error(choose: Callable[..., int], *given: object) -> TokenOrError:
    """The chosen token, or the exception: an error of one request must not stop the other requests."""
    try:
        return choose(*given)
    except BaseException as error:
        return error
