"""The events of a parser, piece by piece, and the whole answer that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its name is whole."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of a call's arguments, which are JSON text."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta


@dataclass
class ParsedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> ParsedAnswer:
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case CallStart(_, known, name):
                    self.calls.append(ParsedCall(known, name))
                case ArgumentsDelta(index, text):
                    self.calls[index].arguments += text
        return self


class EventLog:
    """Collects the events of one push; neighbouring pieces of one kind become one event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.n_calls = 0

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def content(self, text: str) -> None:
        if not text:
            return
        if self.events and isinstance(last := self.events[-1], ContentDelta):
            self.events[-1] = ContentDelta(last.text + text)
        else:
            self.events.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        if not text:
            return
        if self.events and isinstance(last := self.events[-1], ReasoningDelta):
            self.events[-1] = ReasoningDelta(last.text + text)
        else:
            self.events.append(ReasoningDelta(text))

    def start(self, call_id: str, name: str) -> int:
        self.events.append(CallStart(self.n_calls, call_id, name))
        self.n_calls += 1
        return self.n_calls - 1

    def arguments(self, index: int, text: str) -> None:
        if not text:
            return
        last = self.events[-1] if self.events else None
        if isinstance(last, ArgumentsDelta) and last.index == index:
            self.events[-1] = ArgumentsDelta(index, last.text + text)
        else:
            self.events.append(ArgumentsDelta(index, text))
