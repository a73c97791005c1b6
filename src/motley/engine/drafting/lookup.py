"""The lookup drafter: what followed the last tokens when they occurred before, in the prompt or in the answer.

An index maps every three tokens in a row to their latest place, and each place to the one before it. Of the latest
places the one with the longest match before it wins; if there are several, the most frequent continuation. A text that
repeats itself continues across its end: after "a b c a b c" the draft is "a b c a b c …".

A prompt is indexed when its request is made, in the caller's thread. A step indexes the new tokens of the answer, and a
portion of anything longer.

Optionally, a user's finished answers count as a part of the text, before the prompt (`RememberedAnswers`). Only the
engine's thread knows them, so these texts are indexed in steps.

`TextIndex` is the specification. The native core has the same index (csrc/lookup.hpp), and looks up all requests in one
call.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.drafting.pace import Pace
from motley.engine.request import LENGTH, STOP, Request

_N_KEY = 3  # tokens
_MAX_PLACES = 8
_MAX_MATCH = 32  # tokens: a longer match is not better
_PORTION = 512  # tokens that are indexed in one step: some 30 µs of native code
_NO_DRAFT = Draft((), "lookup")
_NONE: dict[Request, Draft] = {}
_MAX_USERS = 256  # whose answers are remembered
MAX_REMEMBERED = 65536  # tokens of a user's answers
ONLY_LOOKUP = ("lookup",)  # the drafters of most requests
_GRADES = (4, 6, 12, 24)  # matches of at least so many tokens have grade 1, 2, 3, 4
Continuation = tuple[int, Sequence[int], int]  # a row, tokens that may follow, and the length of the match


class Lookup:
    """Drafts by looking up the requests' own texts. It needs no model, and its drafts take some microseconds."""

    name = "lookup"
    priors = (0.4, 0.55, 0.75, 0.85, 0.9)
    is_free = True
    is_usual = True
    writes_cache = False

    def __init__(self, n_remembered: int = 0) -> None:
        """`n_remembered`: tokens of each user's finished answers that are looked up as well."""
        self._remembered = RememberedAnswers(n_remembered) if n_remembered else None
        # Of the latest requests of `find`: steps mostly have the same ones, and every microsecond of a step counts.
        self._requests: list[Request] = []
        self._indexes: list[Any] = []
        self._answers: list[list[int]] = []
        self._n_max = 0
        self._look_up: Callable[..., list[Continuation]] | None = None
        self._pace = Pace()
        self._n_left = (
            0  # tokens of a text that are not indexed after this step: until there are none, no pause
        )

    def prepare(self, request: Request) -> None:
        """Indexes the prompt of a request that looks up. To be called before the engine has the request, by any thread:
        a long prompt takes milliseconds, which the steps of others should not wait for.
        """
        if self._remembered is None:
            index = request.memory[self.name] = _new_index(request.prompt)
            index.index(index.n_left)

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [_NO_DRAFT] * len(asks)
        n_max = max(ask.n_max for ask in asks)
        for row, tokens, n_match in self._look_up_all([ask.request for ask in asks], n_max):
            kept = tuple(tokens[: asks[row].n_max])
            drafts[row] = Draft(kept, self.name, bisect_right(_GRADES, n_match))
        self._n_left = max(ask.request.memory[self.name].n_left for ask in asks)
        return drafts

    def may_draft(self, request: Request) -> bool:
        return bool(self._look_up_all([request], 1))

    def find(self, requests: Sequence[Request]) -> dict[Request, Draft] | None:
        """The drafts of all requests: mostly none, and one call tells. None: some do not draft by looking up only.

        After some steps without a draft that was of use, only every second step is looked up, later every fourth
        and every eighth.
        """
        if requests != self._requests and not self._keep(requests):
            return None
        if self._n_left > 0:
            self._n_left -= _PORTION
        elif not self._pace.is_due():
            return _NONE
        assert self._look_up is not None
        found = self._look_up(self._indexes, self._answers, self._n_max)
        if not found:
            return _NONE
        drafts = {}
        for row, tokens, n_match in found:
            kept = tuple(tokens[: requests[row].max_draft])
            if kept:
                drafts[requests[row]] = Draft(kept, self.name, bisect_right(_GRADES, n_match))
        return drafts

    def note_use(self) -> None:
        """A draft was right, or is likely to be used in the next step: from now on, each step is looked up."""
        self._pace.note_use()

    @property
    def n_pause(self) -> int:
        """How many of the next steps need not be looked up."""
        return 0 if self._n_left > 0 else self._pace.n_pause

    def is_due(self) -> bool:
        """Counts a step in which `find` is not called; returns whether it would have looked up."""
        return self._pace.is_due() or self._n_left > 0

    def pass_over(self, n_steps: int) -> None:
        """So many steps come without a call of `find` or `is_due`."""
        self._pace.pass_over(n_steps)

    def _keep(self, requests: Sequence[Request]) -> bool:
        """Keeps what `find` needs of requests; False: some do not draft by looking up only."""
        indexes, answers, n_max = [], [], 0
        for request in requests:
            index, own = request.memory.get(self.name), request.speculation
            if index is None or own.drafters != ONLY_LOOKUP or isinstance(index, TextIndex):
                return False
            indexes.append(index)
            answers.append(request.generated)
            n_max = max(n_max, own.draft_max)
        from motley.backends import look_up  # here: it imports torch, which a server's front must not

        self._requests, self._indexes, self._answers, self._n_max = list(requests), indexes, answers, n_max
        self._n_left = max(index.n_left for index in indexes) - _PORTION
        self._look_up = look_up
        self.note_use()
        return True

    def _look_up_all(self, requests: Sequence[Request], n_max: int) -> list[Continuation]:
        """The likely continuations of the texts of requests, of those that have one."""
        from motley.backends import look_up  # see above

        indexes = []
        for request in requests:
            index = request.memory.get(self.name)
            if index is None:
                earlier = () if self._remembered is None else self._remembered.of(request)
                text = (*earlier, *request.prompt) if earlier else request.prompt
                index = request.memory[self.name] = _new_index(text)
            indexes.append(index)
        answers = [request.generated for request in requests]
        if not isinstance(indexes[0], TextIndex):
            return look_up(indexes, answers, n_max)
        found = []
        for row, (index, answer) in enumerate(zip(indexes, answers, strict=True)):
            index.extend(answer)
            tokens, n_match = index.continuation(n_max)
            if tokens:
                found.append((row, tokens, n_match))
        return found


def _new_index(text: Sequence[int]) -> Any:
    """A native index of a text, or one of the specification if there is no native code."""
    from motley.backends import new_text_index  # here: it imports torch, which a server's front must not

    index = new_text_index(text)
    return TextIndex(text) if index is None else index


class RememberedAnswers:
    """The latest finished answers of each user: of requests with the same `cache_salt`.

    How fast an answer comes tells whether its text has been in another answer of the same user, so this is an option.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens  # of each user
        self._answers: OrderedDict[str | None, deque[int]] = OrderedDict()  # by user, the latest one last
        self._running: list[Request] = []

    def of(self, request: Request) -> list[int]:
        """The answers of the request's user, one after the other. The request's own will be remembered, too."""
        for other in self._running:
            if other.finish_reason in (STOP, LENGTH):
                self._add(other.cache_salt, other.generated)
        self._running = [other for other in self._running if not other.is_finished]
        self._running.append(request)
        return list(self._answers.get(request.cache_salt, ()))

    def _add(self, user: str | None, answer: Sequence[int]) -> None:
        self._answers.setdefault(user, deque(maxlen=self._max_tokens)).extend(answer)
        self._answers.move_to_end(user)
        if len(self._answers) > _MAX_USERS:
            self._answers.popitem(last=False)


class TextIndex:
    """A text that grows, and the places of every three tokens in it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._n_prompt = len(self._text)
        self._latest: dict[
            tuple[int, ...], int
        ] = {}  # three tokens → the place after their latest occurrence
        self._before = array(
            "q", [-1] * _N_KEY
        )  # place → the place before it with the same three tokens; -1: none

    @property
    def n_left(self) -> int:
        """Tokens that are not indexed yet."""
        return max(0, len(self._text) - len(self._before))

    def extend(self, generated: Sequence[int]) -> None:
        """Takes new tokens of the answer, and indexes a portion of what is not indexed yet."""
        self._text += generated[len(self._text) - self._n_prompt :]
        self.index()

    def index(self, n_max: int = _PORTION) -> None:
        """Indexes up to `n_max` of the tokens that are not indexed yet."""
        text, first = self._text, len(self._before)
        for place in range(first, first + min(self.n_left, n_max)):
            key = (text[place - 3], text[place - 2], text[place - 1])
            self._before.append(self._latest.get(key, -1))
            self._latest[key] = place

    def continuation(self, n_max: int) -> tuple[tuple[int, ...], int]:
        """Up to `n_max` tokens that may follow the text, and the length of the match that they come from."""
        text = self._text
        place = self._latest.get((text[-3], text[-2], text[-1]), -1) if len(text) >= _N_KEY else -1
        if place < 0:
            return (), 0
        places: list[int] = []
        n_best = _N_KEY
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            n_match = self._n_match(place)
            if n_match > n_best:
                places.clear()
                n_best = n_match
            if n_match == n_best:
                places.append(place)
            if n_best == _MAX_MATCH:
                break
            place = self._before[place]
        start = places[0]
        if len(places) > 2:
            token = Counter(text[place] for place in places).most_common(1)[0][0]
            start = next(place for place in places if text[place] == token)
        period = len(text) - start
        tokens = text[start : start + n_max]
        while len(tokens) < n_max:  # the copy continues with the tokens that it has copied
            tokens.append(tokens[-period])
        return tuple(tokens), n_best

    def _n_match(self, place: int) -> int:
        """How many tokens before `place` are the last ones of the text."""
        text, n_text = self._text, len(self._text)
        n = _N_KEY
        while n < _MAX_MATCH and n < place and text[place - 1 - n] == text[n_text - 1 - n]:
            n += 1
        return n
