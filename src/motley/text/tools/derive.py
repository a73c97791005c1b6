"""A model's `ToolFormat`, found by rendering its own template with sample conversations and comparing the results.

Names and values of the samples occur nowhere else, so each is found again in the rendered text; what stands between
them are the markers. Where several calls differ from one call, the difference is what stands around each call.
Some templates cannot be read so; `exceptions` has their formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from motley.errors import TemplateError
from motley.text.messages import template_variables
from motley.text.template import ChatTemplate
from motley.text.tools.exceptions import KNOWN_REASONING, exception_for
from motley.text.tools.format import (
    KEY,
    NUMBER,
    JsonCall,
    NamedCall,
    Reasoning,
    Style,
    TaggedCall,
    ToolFormat,
)

USER, CONTENT, REASON = "zquser", "zqcontent", "zqreason"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
NAMES, IDS = ("zqtool", "zqother"), ("zqid00001", "zqid00002")
KEYS = ("zqfirst", "zqsecond")
ARGUMENTS: tuple[dict[str, object], ...] = (
    {"zqfirst": "zqvalue", "zqsecond": 7351},
    {"zqfirst": "zqfurther", "zqsecond": 7352},
)
VALUES = (("zqvalue", "7351"), ("zqfurther", "7352"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A sample.",
            "parameters": {
                "type": "object",
                "properties": {
                    "zqfirst": {"type": "string", "description": "Text."},
                    "zqsecond": {"type": "integer", "description": "A number."},
                },
                "required": ["zqfirst"],
            },
        },
    }
    for name in NAMES
]
# Tokens that end a turn in place of the usual one.
TURN_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|call|>", "<|calls|>", "<|tool_response>", "<|eom|>")


def derive_format(template: ChatTemplate) -> ToolFormat:
    """The format of a template; `Style.GENERIC` where the template knows no tools."""
    samples = _Samples(template)
    reasoning = _reasoning(samples)
    start, end = _content_markers(samples, reasoning)
    shows_tools = NAMES[0] in samples.prompt_with_tools
    known = exception_for(template.source)
    if known is not None:
        return replace(known, reasoning=known.reasoning or reasoning, shows_tools=shows_tools)
    base = ToolFormat(
        Style.GENERIC,
        reasoning=reasoning,
        content_start=start,
        content_end=end,
        shows_tools=False,
        has_text_arguments=samples.one is not None and samples.has_text_arguments,
    )
    if samples.one is None:
        return base
    found = _calls(samples, base)
    if found is not None and found.tagged is not None and "<![CDATA[" in samples.source:
        found = replace(found, tagged=replace(found.tagged, has_cdata=True))
    return base if found is None else replace(found, shows_tools=shows_tools)


class _Samples:
    """The template's renderings of the samples, from the end of the user's text on; None if it refuses one."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.source = template.source
        self.has_text_arguments = False
        self.prompt = self._tail([])
        self.prompt_with_tools = self._render([], tools=True, prompt=True) or ""
        self.plain = self._tail([{"role": "assistant", "content": CONTENT}], prompt=False) or ""
        self.thought = self._tail(
            [{"role": "assistant", "content": CONTENT} | dict.fromkeys(REASONING_FIELDS, REASON)],
            prompt=False,
        )
        self.one = self._called(1)
        if self.one is None:
            self.has_text_arguments = True
            self.one = self._called(1)
        self.two = self._called(2)

    def _called(self, n: int) -> str | None:
        calls = [
            {
                "id": IDS[i],
                "type": "function",
                "function": {
                    "name": NAMES[i],
                    "arguments": json.dumps(ARGUMENTS[i]) if self.has_text_arguments else ARGUMENTS[i],
                },
            }
            for i in range(n)
        ]
        text = self._tail([{"role": "assistant", "content": "", "tool_calls": calls}], prompt=False)
        return text if text is not None and all(NAMES[i] in text for i in range(n)) else None

    def _tail(self, answer: Sequence[Mapping[str, object]], prompt: bool = True) -> str | None:
        text = self._render(answer, tools=True, prompt=prompt)
        return None if text is None else text[text.rfind(USER) + len(USER) :]

    def _render(self, answer: Sequence[Mapping[str, object]], tools: bool, prompt: bool) -> str | None:
        try:
            return self._template.render(
                [{"role": "user", "content": USER}, *answer],
                tools=TOOLS if tools else None,
                add_generation_prompt=prompt,
                **template_variables(self.source, TOOLS),
            )
        except TemplateError:
            return None


def _reasoning(samples: _Samples) -> Reasoning | None:
    prompt, thought = samples.prompt or "", samples.thought or ""
    at = thought.find(REASON)
    if at >= 0:
        before, after = thought[:at].rstrip(), thought[at + len(REASON) :].lstrip()
        for pair in KNOWN_REASONING:
            if before.endswith(pair.start.rstrip()):
                return pair
        opened, closed = re.search(r"<[^<>\s]+>$", before), re.match(r"<[^<>\s]+>|\[[A-Z ]+\]", after)
        if opened and closed and closed[0] == "</" + opened[0][1:]:
            return Reasoning(opened[0], closed[0])
        rest = prompt[len(_common_prefix(prompt, thought)) :].strip()
        if closed and rest:
            return Reasoning(rest, closed[0])
    for pair in KNOWN_REASONING:
        if pair.start in prompt or (pair.start in samples.source and pair.end in samples.source):
            return pair
    return None


def _content_markers(samples: _Samples, reasoning: Reasoning | None) -> tuple[str, str]:
    """The text around an answer's text, besides the turn's own beginning and end."""
    header = _header(samples, samples.plain)
    at = samples.plain.find(CONTENT)
    if at < 0:
        return "", ""
    start = _without_reasoning(samples.plain[len(header) : at], reasoning)
    if not start.strip() or (samples.prompt or "").rstrip().endswith(start.strip()):
        return "", ""
    after = samples.plain[at + len(CONTENT) :]
    ends = [text for text in (samples.one, samples.prompt) if text]
    turn_end = max((_drop_tag_end(_common_suffix(after, text)) for text in ends), key=len, default="")
    return start.strip(), after.removesuffix(turn_end).strip()


def _header(samples: _Samples, text: str) -> str:
    """The beginning of the assistant's turn: what prompt and `text` have in common."""
    return _drop_tag_start(_common_prefix(samples.prompt or "", text))


def _without_reasoning(text: str, reasoning: Reasoning | None) -> str:
    for marker in (reasoning.start, reasoning.end) if reasoning else ():
        text = text.replace(marker.strip(), "")
    return text


def _calls(samples: _Samples, base: ToolFormat) -> ToolFormat | None:
    one = samples.one or ""
    one = one[len(_header(samples, one)) :]
    first = _Call.find(one, 0, 0)
    if first is None:
        return None
    before = _without_reasoning(one[: first.start], base.reasoning)
    for marker in (base.content_start, base.content_end):
        before = before.replace(marker, "", 1) if marker else before
    last_tag = re.search(r"<[^<>\s]+>$", (samples.prompt or "").rstrip())
    if last_tag and before.lstrip().startswith(last_tag[0]):  # the end of a header that differs otherwise
        before = before.lstrip().removeprefix(last_tag[0])
    after = _without_turn_end(one[first.end :], samples)
    whole = replace(
        base,
        style=first.style,
        call_start=before.lstrip(),
        call_end=after.rstrip(),
        json=first.json,
        named=first.named,
        tagged=first.tagged,
        is_parallel=False,
    )
    second = _second(samples.two, first)
    if second is None:
        return whole
    between, two_named = second
    call_start = _drop_tag_end(_common_suffix(before, between)).lstrip()
    section_start = before[: len(before) - len(call_start)].lstrip()
    left = between[: len(between) - len(call_start)]
    call_end = _drop_tag_start(_common_prefix(left, after)).rstrip()
    return replace(
        whole,
        section_start=section_start,
        call_start=call_start,
        call_end=call_end,
        separator=left[len(call_end) :],
        section_end=after[len(call_end) :].rstrip(),
        named=two_named,
        is_parallel=True,
    )


def _second(two: str | None, first: _Call) -> tuple[str, NamedCall] | None:
    """The text between two calls, and the part between name and arguments if it differs from call to call."""
    if two is None:
        return None
    one = _Call.find(two, 0, 0)
    other = _Call.find(two, one.end, 1) if one else None
    if one is None or other is None or other.style is not first.style:
        return None
    named = first.named
    if one.named.name_end != other.named.name_end and len(one.named.name_end) == 1:
        a, b = one.named.name_end[0], other.named.name_end[0]
        head, tail = _common_prefix(a, b), _common_suffix(a, b)
        named = replace(named, name_end=(head, tail))
    return two[one.end : other.start], named


@dataclass(frozen=True)
class _Call:
    """The range of a sample's call in a text, from its name or object to the end of its arguments."""

    style: Style
    start: int
    end: int
    json: JsonCall = field(default_factory=JsonCall)
    named: NamedCall = field(default_factory=NamedCall)
    tagged: TaggedCall | None = None

    @classmethod
    def find(cls, text: str, begin: int, i: int) -> _Call | None:
        searches: tuple[Callable[[str, int, int], _Call | None], ...] = (
            _json_call,
            _named_call,
            _tagged_call,
        )
        return next((call for search in searches if (call := search(text, begin, i))), None)


def _json_call(text: str, begin: int, i: int) -> _Call | None:
    name = text.find(NAMES[i], begin)
    for at in (m.start() for m in re.finditer(r"\{", text[begin : max(name, begin)])):
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin + at)
        except ValueError:
            continue
        if value == {NAMES[i]: ARGUMENTS[i]}:
            return _Call(Style.JSON, begin + at, end, JsonCall(is_keyed_by_name=True))
        keys = {key: v for key, v in value.items() if not isinstance(v, dict | list)}
        name_key = next((key for key, v in keys.items() if v == NAMES[i]), None)
        args_key = next((key for key, v in value.items() if v == ARGUMENTS[i]), None)
        if name_key and args_key:
            ids = (key for key, v in keys.items() if v == IDS[i] or (isinstance(v, str) and v.isdigit()))
            id_key = next(ids, None)
            form = JsonCall(name_key, args_key, id_key, is_id_first=next(iter(value)) == id_key)
            return _Call(Style.JSON, begin + at, end, form)
    return None


def _named_call(text: str, begin: int, i: int) -> _Call | None:
    name = text.find(NAMES[i], begin)
    for at in (m.start() for m in re.finditer(r"\{", text[max(name, 0) :])):
        try:
            value, end = json.JSONDecoder().raw_decode(text, name + at)
        except ValueError:
            continue
        if value != ARGUMENTS[i]:
            return None
        between = text[name + len(NAMES[i]) : name + at]
        parts = tuple(between.split(IDS[i])) if IDS[i] in between else (between,)
        known = text.rfind(IDS[i], begin, name)
        start, id_start = (name, None) if known < 0 else (known, text[known + len(IDS[i]) : name])
        return _Call(Style.NAMED_JSON, start, end, named=NamedCall(parts, id_start))
    return None


def _tagged_call(text: str, begin: int, i: int) -> _Call | None:
    name = text.find(NAMES[i], begin)
    places, at = [], name + len(NAMES[i])
    for part in (KEYS[0], VALUES[i][0], KEYS[1], VALUES[i][1]):
        found = text.find(part, at)
        if name < 0 or found < 0:
            return None
        places.append((at, found))
        at = found + len(part)
    to_key, to_value, to_next, to_number = (text[a:b] for a, b in places)
    to_next = to_next.replace(KEYS[0], KEY)
    after = text[at:]
    key_start = _drop_tag_end(_common_suffix(to_key, to_next))
    left = to_next[: len(to_next) - len(key_start)]
    # The last value's end and what follows it: the end of the parameter is what both have in common.
    value_end = _drop_tag_start(_common_prefix(left, after.replace(KEYS[1], KEY)))
    tagged = TaggedCall(
        name_end=to_key[: len(to_key) - len(key_start)].replace(f'"{i + 1}"', f'"{NUMBER}"'),
        key_start=key_start,
        value_start=to_value,
        json_start=to_number,
        value_end=value_end,
        separator=left[len(value_end) :],
    )
    if (
        NAMES[i] in tagged.name_end
        or not value_end.strip()
        or not key_start.strip()
        or value_end.strip() in "'\","
    ):
        return None
    return _Call(Style.TAGGED, name, at + len(value_end.replace(KEY, KEYS[1])), tagged=tagged)


def _without_turn_end(text: str, samples: _Samples) -> str:
    at = samples.plain.find(CONTENT)
    end, text = samples.plain[at + len(CONTENT) :].rstrip(), text.rstrip()
    common = _drop_tag_end(_common_suffix(text, end))
    text = text.removesuffix(common) if common.strip() else text
    for marker in TURN_ENDS:
        text = text.removesuffix(marker)
    return re.sub(r"<[^<>]*eos[^<>]*>$", "", text)


def _drop_tag_end(text: str) -> str:
    """The text without the end of a tag whose beginning is missing."""
    for left, right in (("<", ">"), ("[", "]")):
        close = text.find(right)
        if close >= 0 and not 0 <= text.find(left) < close:
            text = text[close + 1 :]
    return text.removeprefix("<|sep|>")  # the end of tags such as "<|open|>call<|sep|>"


def _drop_tag_start(text: str) -> str:
    """The text without the beginning of a tag whose end is missing."""
    for left, right in (("<", ">"), ("[", "]")):
        if text.rfind(left) > text.rfind(right):
            text = text[: text.rfind(left)]
    return text


def _common_prefix(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def _common_suffix(a: str, b: str) -> str:
    return _common_prefix(a[::-1], b[::-1])[::-1]
