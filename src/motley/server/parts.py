"""Answers in pieces: text → content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


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


Delta = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta


class Parser(Protocol):
    """Takes pieces of text, gives deltas; one for each answer."""

    def push(self, piece: str) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


class PlainParser:
    """All text is content."""

    def push(self, piece: str) -> list[Delta]:
        return [ContentDelta(piece)] if piece else []

    def finish(self) -> list[Delta]:
        return []


@dataclass
class Message:
    """The deltas of an answer added up."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)  # id, name, arguments

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.content += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif isinstance(delta, CallStart):
                self.calls.append({"id": delta.id, "name": delta.name, "arguments": ""})
            else:
                self.calls[delta.index]["arguments"] += delta.text


def parse(parser: Parser, text: str) -> Message:
    """A whole answer at once."""
    message = Message()
    message.add(parser.push(text))
    message.add(parser.finish())
    return message
