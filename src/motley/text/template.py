"""Chat templates: a list of messages → the text that the model was trained to see."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import CodeType
from typing import Protocol

from jinja2 import Template, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError

from motley.errors import TemplateError
from motley.text.marked import ROLES, MarkedText, join, own, plain
from motley.text.meter import Meter, TemplateLimits
from motley.text.sandbox import Sandbox

KEY = "tokenizer.chat_template"
MAX_SOURCE = 64 * 1024  # characters; the longest in use have 20,000
MAX_INPUT_DEPTH = 64
# Statements that change a list of a namespace, which the sandbox forbids, and the same without changing it.
_APPEND = re.compile(r"\{%(-?)\s*set\s+\w+\s*=\s*(\w+\.\w+)\.append\(([\w.\[\]'\"]+)\)\s*(-?)%\}")
_POP_FIRST = re.compile(r"\{%(-?)\s*set\s+(\w+)\s*=\s*(\w+\.\w+)\.pop\(0\)\s*(-?)%\}")

_CONTENT = (
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    + _CONTENT
    + "{{ '<|im_end|>\\n' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message.role|capitalize }}: "
    + _CONTENT
    + "{{ '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class HasMetadata(Protocol):
    """The part of a `ModelSpec` that this package needs."""

    @property
    def metadata(self) -> Mapping[str, object]: ...


class ChatTemplate:
    """A compiled template.

    Encode what `render_marked` gives with `Tokenizer.encode_marked`, which adds a missing beginning-of-text token and
    never a second one.

    `stops`: strings that end the assistant's turn, for templates whose vocabulary has no token for that.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        stops: Sequence[str] = (),
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.stops = tuple(stops)
        self._special = {"bos_token": own(bos), "eos_token": own(eos)}
        self._limits = limits or TemplateLimits()
        self._now = now
        self._code = _compile(source, self._sandbox())

    @classmethod
    def from_spec(cls, spec: HasMetadata, *, name: str | None = None) -> ChatTemplate:
        return cls.from_metadata(spec.metadata, name=name)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], *, name: str | None = None) -> ChatTemplate:
        """The template of the file, or its variant of that name ("tool_use").

        Without one in the file: ChatML where the vocabulary has its tokens, otherwise a plain "User: …" and
        "Assistant:", with the stop strings that it needs.
        """
        bos, eos = _token_text(metadata, "bos"), _token_text(metadata, "eos")
        source = metadata.get(KEY if name is None else f"{KEY}.{name}")
        if source is None and name is not None:
            known = ", ".join(template_names(metadata)) or "none"
            raise TemplateError(f"the file has no chat template named {name!r}", hint=f"it has: {known}")
        if source is None:
            tokens = metadata.get("tokenizer.ggml.tokens")
            if isinstance(tokens, Sequence) and "<|im_start|>" in tokens and "<|im_end|>" in tokens:
                return cls(CHATML, stops=("<|im_end|>",), bos=bos, eos=eos)
            return cls(PLAIN, stops=("\n\nUser:", "\nUser:"), bos=bos, eos=eos)
        if not isinstance(source, str):
            raise TemplateError(f"{KEY} is not a string")
        return cls(source, bos=bos, eos=eos)

    @classmethod
    def from_source(
        cls, source: str, metadata: Mapping[str, object], *, stops: Sequence[str] = ()
    ) -> ChatTemplate:
        """A template that is not the file's, with the file's special tokens."""
        return cls(source, bos=_token_text(metadata, "bos"), eos=_token_text(metadata, "eos"), stops=stops)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt. `kwargs` are variables that some templates know, such as `enable_thinking`."""
        return plain(
            self.render_marked(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)
        )

    def render_marked(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> MarkedText:
        """The prompt that `render` gives, and which of its characters are the template's own.

        `Tokenizer.encode_marked` reads control tokens only there, so that no message can forge a turn.
        """
        variables = {
            "documents": None,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        data = self._special | {name: _plain(value, name) for name, value in variables.items()}
        _own_roles(data["messages"])
        sandbox = self._sandbox()
        template = Template.from_code(sandbox, self._code, sandbox.globals)
        try:
            return join("", [template.render(data)])
        except Exception as error:  # an untrusted template can raise anything
            absent = [n for n in ("tools", "documents") if data[n] is None and n in self.source]
            raise _explained(error, absent) from error

    def _sandbox(self) -> Sandbox:
        return Sandbox(Meter(self._limits), self._now)


def template_names(metadata: Mapping[str, object]) -> list[str]:
    """The names of the variants in the file, besides the template without a name."""
    return sorted(key.removeprefix(KEY + ".") for key in metadata if key.startswith(KEY + "."))


def _compile(source: str, sandbox: Sandbox) -> CodeType:
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"the chat template has {len(source)} characters", hint=f"at most {MAX_SOURCE}")
    try:
        return sandbox.compile(_without_changes(source))
    except TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
    except Exception as error:  # the compiler's own limits: nesting, literals too large
        raise TemplateError(
            f"the chat template cannot be compiled: {str(error) or type(error).__name__}"
        ) from error


def _without_changes(source: str) -> str:
    """`ns.queue.append(x)` as `ns.queue + [x]`, and `pop(0)` likewise: Kimi K2's templates keep a queue of ids."""
    source = _APPEND.sub(r"{%\1 set \2 = \2 + [\3] \4%}", source)
    return _POP_FIRST.sub(r"{%\1 set \2 = \3[0] \4%}{%\1 set \3 = \3[1:] \4%}", source)


def _explained(error: Exception, absent: Sequence[str]) -> TemplateError:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    where = f" (line {lines[-1]})" if lines else ""
    if isinstance(error, TemplateError):
        return TemplateError(error.message + where, hint=error.hint)
    if isinstance(error, UndefinedError):
        return TemplateError(
            f"the chat template uses something that is not there: {error.message}{where}",
            hint="pass it as a keyword argument, or change the messages",
        )
    if isinstance(error, SecurityError):
        return TemplateError(f"the chat template asks for something that it may not have: {error}{where}")
    if isinstance(error, RecursionError):
        return TemplateError(f"the chat template calls itself too deeply{where}")
    hint = f"it uses {' and '.join(absent)}; pass at least an empty list" if absent else None
    return TemplateError(f"the chat template failed: {type(error).__name__}: {error}{where}", hint=hint)


def _plain(value: object, where: str, depth: int = 0) -> object:
    """A copy of nothing but JSON types, so that no object of the caller gets into a template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (str, int, float)):  # subclasses have methods of their own
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if depth == MAX_INPUT_DEPTH:
        raise TemplateError(f"{where} is nested more than {MAX_INPUT_DEPTH} deep")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise TemplateError(f"{where} is a {type(value).__name__}", hint="use text, numbers, lists and mappings")


def _own_roles(messages: object) -> None:
    """Mark the usual roles as the template's own text: some templates make control tokens of them."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") in ROLES:
            message["role"] = own(message["role"])


def _token_text(metadata: Mapping[str, object], name: str) -> str:
    token, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens")
    if isinstance(token, int) and isinstance(tokens, Sequence) and 0 <= token < len(tokens):
        return str(tokens[token])
    return ""
