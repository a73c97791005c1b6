"""One chat request with tools and reasoning: what goes into the engine, and how its answer is read.

    formats = ChatFormat(template)                      # once for a model: derives markers from the template
    session = formats.session(messages, tools=…, tool_choice="auto")
    session.prompt                                      # MarkedText: Tokenizer.encode_marked(session.prompt)
    session.grammar, session.grammar_triggers           # for SamplingParams; None and () where nothing is enforced
    session.stops                                       # strings that end the turn (besides the vocabulary's tokens)
    session.shows_special                               # whether control tokens must appear in the answer's text
    parser = session.parser()                           # one for each choice
    parser.push(piece) → [ContentDelta, ReasoningDelta, CallStart, ArgumentsDelta]; parser.finish() → the rest
    parser.has_calls                                    # then finish_reason is "tool_calls"

The server writes each event as one delta. `session.parses` is False where answers are plain content: then there is no
need for a parser.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from motley.errors import RequestError, TemplateError
from motley.text.marked import MarkedText, join, own
from motley.text.messages import (
    normalise_messages,
    normalise_tools,
    template_variables,
    with_descriptions,
)
from motley.text.template import ChatTemplate
from motley.text.tools.derive import derive_format
from motley.text.tools.events import Event
from motley.text.tools.format import Style, ToolFormat
from motley.text.tools.grammar import Choice, GrammarRequest, make_grammar
from motley.text.tools.harmony import HarmonyParser
from motley.text.tools.parser import ChatParser, new_call_id

# Variables that a request may not set: they are what the request itself is made of.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents"})
MAX_TOOLS = 512
_NAME = re.compile(r"[\w.\-/$]{1,256}")


class AnswerParser(Protocol):
    @property
    def has_calls(self) -> bool: ...

    def push(self, piece: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


@dataclass(frozen=True)
class ToolSession:
    """The engine's options for one request, and parsers for its answers; see the module."""

    prompt: MarkedText
    stops: tuple[str, ...]
    grammar: str | None
    grammar_triggers: tuple[str, ...]
    parses: bool
    shows_special: bool
    parser: Callable[[], AnswerParser]
    opens_reasoning: str | None = None  # the end of reasoning, if the prompt has begun it


class ChatFormat:
    """How a template's model talks. Deriving it renders the template a few times; keep it.

    special_id: the id of a control token by its text, or None (`Tokenizer.token_id` of control tokens): grammars name
    such tokens by id, because as bytes they do not occur.
    """

    def __init__(
        self, template: ChatTemplate, *, special_id: Callable[[str], int | None] = lambda text: None
    ) -> None:
        self.template = template
        self.format: ToolFormat = derive_format(template)
        self._special_id = special_id
        # Mistral's templates refuse other ids.
        self._has_short_ids = "length 9" in template.source or "length != 9" in template.source

    def session(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        enable_thinking: bool | None = None,
        splits_reasoning: bool = True,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> ToolSession:
        """Checks the request, renders its prompt and makes its grammar.

        tool_choice: "auto" (None), "none", "required", or {"type": "function", "function": {"name": …}} (the flat form
        and Anthropic's "any" and "tool" too). parallel_tool_calls: False allows one call. enable_thinking: for
        templates that know it. splits_reasoning: False leaves reasoning in the content. continue_final_message: the
        last message is the beginning of the answer. variables: further variables of the template
        (`chat_template_kwargs`).
        """
        forms = normalise_tools(tools)
        choice = _choice(tool_choice, forms)
        if choice.kind == "none":
            forms = []
        form = self.format
        chat = normalise_messages(messages, has_text_arguments=form.has_text_arguments)
        if self._has_short_ids:
            _shorten_ids(chat)
        prefill = _popped_prefill(chat) if continue_final_message else ""
        extra = _checked_variables(variables)
        if enable_thinking is not None:
            extra.setdefault("enable_thinking", enable_thinking)
        prompt = self._render(chat, forms, extra, add_generation_prompt)
        if add_generation_prompt and extra.get("enable_thinking") is False:
            prompt = self._without_thoughts(prompt)
        if prefill:
            prompt = join("", [prompt, prefill])
        is_reasoning = _opens_reasoning(form, prompt)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in forms}
        grammar, triggers = make_grammar(
            GrammarRequest(
                form,
                schemas,
                choice,
                is_parallel=parallel_tool_calls is not False,
                is_reasoning=is_reasoning,
                may_reason=not _closes_reasoning(form, prompt),
                special_id=self._special_id,
            )
        )
        make_id = _short_id if self._has_short_ids else new_call_id
        reads_markers = bool(form.content_start or form.primer or form.style is Style.HARMONY)
        splits = splits_reasoning and form.reasoning is not None
        parses = bool(forms) or reads_markers or splits

        def parser() -> AnswerParser:
            if form.style is Style.HARMONY:
                return HarmonyParser(splits_reasoning=splits_reasoning, make_id=make_id)
            return ChatParser(
                form,
                tools=schemas,
                is_reasoning=is_reasoning,
                splits_reasoning=splits_reasoning,
                make_id=make_id,
            )

        return ToolSession(
            prompt=prompt,
            stops=self.template.stops,
            grammar=grammar,
            grammar_triggers=triggers,
            parses=parses,
            shows_special=parses,
            parser=parser,
            opens_reasoning=form.reasoning.end.strip() if is_reasoning and form.reasoning else None,
        )

    def _without_thoughts(self, prompt: MarkedText) -> MarkedText:
        """The prompt with closed thoughts, if the template itself does not know `enable_thinking`."""
        reasoning = self.format.reasoning
        if reasoning is None or "enable_thinking" in self.template.source:
            return prompt
        is_open = _opens_reasoning(self.format, prompt)
        start = "" if is_open else reasoning.start.strip()
        return prompt + own(start + reasoning.end.strip())

    def _render(
        self,
        chat: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> MarkedText:
        form = self.format
        shown: Sequence[Mapping[str, Any]] | None = tools or None
        if tools and not form.shows_tools:
            chat, shown = _with_description(chat, _description(form, tools)), None
        if form.style is Style.GENERIC:
            chat = [_without_calls(message) for message in chat]
        variables = {**template_variables(self.template.source, tools), **extra}

        def render(
            chat: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, Any]] | None
        ) -> MarkedText:
            return self.template.render_marked(
                chat, tools=shown, add_generation_prompt=add_generation_prompt, **variables
            )

        try:
            return render(chat, shown)
        except TemplateError:
            if shown is not None:
                return render(chat, with_descriptions(shown))
            if chat and chat[0]["role"] == "system":  # some templates have no such role
                return render(_without_system(chat), [] if "tools" in self.template.source else None)
            if "tools" in self.template.source:
                return render(chat, [])
            raise


def _choice(choice: object, tools: Sequence[Mapping[str, Any]]) -> Choice:
    names = [tool["function"]["name"] for tool in tools]
    if len(names) > MAX_TOOLS:
        raise RequestError(f"there are {len(names)} tools", hint=f"at most {MAX_TOOLS}")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise RequestError(f"two tools have the name {twice!r}")
    bad = next((name for name in names if not _NAME.fullmatch(name)), None)
    if bad is not None:
        raise RequestError(
            f"{bad!r:.80} cannot be the name of a tool",
            hint="letters, digits, _ . - and /; at most 256 of them",
        )
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if name is None:
            choice = choice.get("type", choice.get("mode"))
        elif name not in names:
            raise RequestError(f"tool_choice names {name!r}, which is no tool of this request")
        else:
            return Choice("named", str(name))
    if choice is None or choice == "auto":
        return Choice("auto" if tools else "none")
    if choice == "none":
        return Choice("none")
    if choice in ("required", "any"):
        if not tools:
            raise RequestError("tool_choice asks for a call, but there are no tools")
        return Choice("required")
    raise RequestError(
        f"unknown tool_choice {choice!r:.80}", hint="auto, none, required or a function by name"
    )


def _checked_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    if variables is not None and not isinstance(variables, Mapping):
        raise RequestError("chat_template_kwargs is not an object")
    made = {str(key): value for key, value in (variables or {}).items()}
    bad = next((key for key in made if key in RESERVED or not key.isidentifier()), None)
    if bad is not None:
        raise RequestError(f"chat_template_kwargs may not set {bad!r}")
    return made


def _popped_prefill(chat: list[dict[str, Any]]) -> str:
    if not chat or chat[-1]["role"] != "assistant":
        raise RequestError("continue_final_message needs an assistant's message at the end")
    if len(chat) > 1 and chat[-2]["role"] == "assistant":
        raise RequestError("there are two assistant's messages at the end", hint="give one to continue")
    return str(chat.pop()["content"])


def _opens_reasoning(form: ToolFormat, prompt: str) -> bool:
    """Whether the prompt ends inside of reasoning."""
    if form.reasoning is None:
        return False
    start, end = form.reasoning.start.strip(), form.reasoning.end.strip()
    tail = prompt[-4096:].rstrip()
    opened = tail.rfind(start)
    return opened >= 0 and tail.endswith(start) and tail.rfind(end) <= opened


def _closes_reasoning(form: ToolFormat, prompt: str) -> bool:
    return form.reasoning is None or prompt.rstrip().endswith(form.reasoning.end.strip())


def _shorten_ids(chat: Sequence[dict[str, Any]]) -> None:
    """Ids of nine letters and digits, the same for the same id."""

    def short(known: str) -> str:
        if len(known) == 9 and known.isascii() and known.isalnum():
            return known
        number = sum(ord(c) * 131**i for i, c in enumerate(known[-64:]))
        digits = string.ascii_letters + string.digits
        return "".join(digits[number // 62**i % 62] for i in range(9))

    for message in chat:
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = short(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = short(call["id"])


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _description(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools and how to call them, for templates that do not show them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    if form.style is Style.GENERIC:
        how = (
            'Answer with one JSON object: {"tool_call": {"name": "...", "arguments": {...}}} to call a function, '
            'or {"response": "..."} to answer.'
        )
    else:
        call = form.opening + "NAME" + form.named.name_end[0] + '{"argument": "value"}' + form.call_end
        how = f"To call one, write:\n{call}{form.section_end}"
    return f"You may call these functions:\n{listed}\n\n{how}"


def _with_description(chat: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def _without_system(chat: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system's text before the user's first."""
    text, rest = chat[0]["content"], list(chat[1:])
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": text}, *rest]
    return [{**rest[0], "content": f"{text}\n\n{rest[0]['content']}"}, *rest[1:]]


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Calls and results as text, for templates that would leave them out."""
    if message.get("tool_calls"):
        calls = [call["function"] for call in message["tool_calls"]]
        value = {"tool_call": calls[0]} if len(calls) == 1 else {"tool_calls": calls}
        text = json.dumps(value, ensure_ascii=False)
        return {"role": "assistant", "content": f"{message['content']}\n{text}".strip()}
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": json.dumps({"tool_response": message["content"]}, ensure_ascii=False),
        }
    return message


__all__ = ["AnswerParser", "ChatFormat", "ToolSession"]
