"""Tool calls and reasoning: how a model writes them, how they are read and how they are enforced.

format        the texts around reasoning, content and calls
derive        a template's format, by rendering samples and comparing
exceptions    formats that cannot be derived
messages      messages and tools as templates take them
session       `ChatFormat.session`: prompt, grammar and parser of one request; where the server begins
events        what a parser makes of an answer
parser        text in pieces → events
section       calls and what stands between them; readers, own_syntax, generic and harmony read one call each
json_scan     one JSON value, character by character
literals      markers in text that comes in pieces
schema        the types of raw arguments
grammar       Lark grammars for llguidance
"""

from __future__ import annotations

from motley.text.messages import normalise_messages, normalise_tools
from motley.text.tools.derive import derive_format
from motley.text.tools.events import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ParsedAnswer,
    ParsedCall,
    ReasoningDelta,
)
from motley.text.tools.format import Reasoning, Style, ToolFormat
from motley.text.tools.parser import ChatParser, parse_answer
from motley.text.tools.session import AnswerParser, ChatFormat, ToolSession

__all__ = [
    "AnswerParser",
    "ArgumentsDelta",
    "CallStart",
    "ChatFormat",
    "ChatParser",
    "ContentDelta",
    "Event",
    "ParsedAnswer",
    "ParsedCall",
    "Reasoning",
    "ReasoningDelta",
    "Style",
    "ToolFormat",
    "ToolSession",
    "derive_format",
    "normalise_messages",
    "normalise_tools",
    "parse_answer",
]
