"""Slots, as llama-server shows them. Motley has none: requests share steps and one prefix cache. A slot is a name for
one of the requests that may run at the same time, and remembers the tokens of the last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from motley.server.jobs import Job

# Fields of `SamplingParams` and arguments of `LLM.forget`.
_PREFIX = ("cache_salt", "n_expert_used", "n_layer_exit")


@dataclass
class Slot:
    """One slot: the request in it, and the tokens of the latest one."""

    number: int
    request: int | None = None  # the number of its ticket
    job: Job | None = None
    tokens: list[int] = field(default_factory=list)  # whose cache `save` writes
    prefix: dict[str, Any] = field(default_factory=dict)  # what its cache is found by, besides tokens
    generated: Sequence[int] = ()  # by the request in it

    @property
    def n_decoded(self) -> int:
        return len(self.generated)

    def remember(self, tokens: list[int], job: Job | None = None) -> None:
        """Take the tokens of the latest request. `job`: the request; None: they came from a file."""
        self.tokens = tokens
        self.prefix = {} if job is None else {name: getattr(job.params, name) for name in _PREFIX}


class Slots:
    """Gives requests slots in the order of their arrival, as the engine runs them."""

    def __init__(self, n_slots: int) -> None:
        self.all = [Slot(number) for number in range(n_slots)]
        self._slot_of: dict[int, Slot] = {}
        self._deferred: OrderedDict[int, tuple[Job, Sequence[int]]] = OrderedDict()

    @property
    def n_busy(self) -> int:
        return len(self._slot_of)

    @property
    def n_free(self) -> int:
        return len(self.all) - self.n_busy

    @property
    def n_deferred(self) -> int:
        return len(self._deferred)

    def of(self, request: int) -> int:
        """The number of the request's slot; -1 while it waits."""
        slot = self._slot_of.get(request)
        return -1 if slot is None else slot.number

    def take(self, request: int, job: Job, generated: Sequence[int] = ()) -> None:
        """Gives the request the slot that it names, or another free one; without one it waits. `generated` grows."""
        free = [slot for slot in self.all if slot.request is None]
        if not free:
            self._deferred[request] = (job, generated)
            return
        named = [slot for slot in free if slot.number == job.id_slot]
        slot = (named or free)[0]
        slot.request, slot.job, slot.generated = request, job, generated
        self._slot_of[request] = slot

    def release(self, request: int, tokens: list[int]) -> None:
        """Ends a request whose cache has these tokens; the next one that waits gets its slot."""
        self._deferred.pop(request, None)
        slot = self._slot_of.pop(request, None)
        if slot is None:
            return
        slot.remember(tokens, slot.job)
        slot.request, slot.job, slot.generated = None, None, ()
        if self._deferred:
            number, waiting = self._deferred.popitem(last=False)
            self.take(number, *waiting)

    def resize(self, n_slots: int) -> None:
        """Before the first request only: the engine has chosen how many run at the same time."""
        self.all = [Slot(number) for number in range(n_slots)]
