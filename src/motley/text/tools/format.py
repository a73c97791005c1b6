"""How a model writes reasoning, content and tool calls: the literal texts around each part.

Literals are as the template writes them, white space included: grammars use them so. Parsers match them with any
white space (`literals`), because models are less exact than templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Style(Enum):
    """How a call is written between its markers."""

    JSON = "one JSON object with name and arguments"
    NAMED_JSON = "the name, then the arguments as JSON"
    TAGGED = "the name, then each argument as raw text between tags"
    PYTHON = "calls as in Python: f(a='x', b=2)"
    GEMMA = 'name{key:<|"|>text<|"|>,key:2}'
    HARMONY = "messages with channels and recipients"
    GENERIC = 'one JSON object with "tool_call", "tool_calls" or "response"; for templates without tools'


@dataclass(frozen=True)
class Reasoning:
    start: str
    end: str


@dataclass(frozen=True)
class JsonCall:
    """Keys of the object. `is_keyed_by_name`: the object is {name: arguments}."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str | None = None
    is_id_first: bool = False
    is_keyed_by_name: bool = False


@dataclass(frozen=True)
class NamedCall:
    """`name_end` stands between name and arguments; a call's id or number may stand between its two parts."""

    name_end: tuple[str, ...] = ("",)  # two parts: there is an id or a number between them
    id_start: str | None = None  # the text between an id and the name, where the id comes first


KEY = "\0"  # in `TaggedCall.value_end`: the parameter's name again
NUMBER = "\1"  # in literals: a number


@dataclass(frozen=True)
class TaggedCall:
    """name + name_end, then for each parameter: key_start key value_start value value_end + separator.

    `json_start` instead of `value_start` before values that are not text, if the template makes a difference.
    """

    name_end: str
    key_start: str
    value_start: str
    json_start: str
    value_end: str
    separator: str = ""
    has_cdata: bool = False  # text with markup in it is wrapped: <![CDATA[…]]>


@dataclass(frozen=True)
class ToolFormat:
    """section_start, calls with `separator` between them, section_end; a call is call_start … call_end.

    shows_tools: whether the template writes the tools into the prompt. is_parallel: whether a turn may have several
    calls. has_text_arguments: whether the template wants arguments as JSON text instead of a mapping. primer: the end
    of the generation prompt that belongs to the answer's first marker.
    """

    style: Style
    section_start: str = ""
    section_end: str = ""
    call_start: str = ""
    call_end: str = ""
    separator: str = ""
    json: JsonCall = JsonCall()
    named: NamedCall = NamedCall()
    tagged: TaggedCall | None = None
    reasoning: Reasoning | None = None
    content_start: str = ""
    content_end: str = ""
    shows_tools: bool = True
    is_parallel: bool = True
    has_text_arguments: bool = False
    primer: str = ""

    @property
    def opening(self) -> str:
        """Everything before the first call's object or name."""
        return self.section_start + self.call_start

    @property
    def trigger(self) -> str:
        """The text by which a call is recognised in an answer; "" where a call has no marker of its own."""
        if self.style is Style.HARMONY:
            return " to=functions."
        return first_tag(self.opening)


def first_tag(literal: str) -> str:
    """The first tag of a literal, or else its first word."""
    text = literal.strip()
    if text.startswith("<|open|>") and "<|sep|>" in text:  # one tag of several tokens
        return text[: text.find("<|sep|>") + len("<|sep|>")]
    end = next((i for i, c in enumerate(text) if c.isspace()), len(text))
    if (text.startswith("<") and (close := text.find(">", 0, end)) > 0) or (
        text.startswith("[") and (close := text.find("]", 0, end)) > 0
    ):
        end = close + 1
    return text[:end]
