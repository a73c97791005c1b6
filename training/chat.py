"""Conversations as the model reads them: ChatML, tools in the Hermes form. `TEMPLATE` goes into the GGUF file.

`render` gives the same text as the template does (a test compares them), only faster: training renders millions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

DEFAULT_SYSTEM = "You are Motley, a small and friendly assistant."
TOOLS_BEFORE = "\n\n# Tools\n\nYou may call these functions:\n<tools>"
TOOLS_AFTER = (
    "\n</tools>\n\nTo call one, answer with its name and arguments:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)

TEMPLATE = (
    "{%- macro text(message) -%}{%- if message.content is string -%}{{- message.content -}}"
    "{%- elif message.content -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{{- '<|im_start|>system\\n' -}}"
    "{%- if messages and messages[0].role == 'system' -%}{{- text(messages[0]) -}}"
    f"{{%- else -%}}{{{{- {DEFAULT_SYSTEM!r} -}}}}{{%- endif -%}}"
    "{%- if tools -%}"
    f"{{{{- {TOOLS_BEFORE!r} -}}}}"
    "{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}"
    f"{{{{- {TOOLS_AFTER!r} -}}}}"
    "{%- endif -%}{{- '<|im_end|>\\n' -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' + text(message) + '\\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- elif message.role == 'assistant' and message.tool_calls -%}"
    "{{- '<|im_start|>assistant' -}}"
    "{%- if message.content -%}{{- '\\n' + text(message) -}}{%- endif -%}"
    "{%- for call in message.tool_calls -%}"
    "{%- set call = call.function if call.function else call -%}"
    "{{- '\\n<tool_call>\\n{\"name\": ' + call.name | tojson + ', \"arguments\": ' -}}"
    "{{- call.arguments if call.arguments is string else call.arguments | tojson -}}"
    "{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}{{- '<|im_end|>\\n' -}}"
    "{%- elif not (loop.first and message.role == 'system') -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + text(message) + '<|im_end|>\\n' -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Task:
    """A piece of conversation that ends with the assistant's answer.

    `accepts` tells whether another answer to the same question is right; by default only the same text is.
    """

    skill: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    system: str | None = None
    accepts: Callable[[str], bool] | None = None

    @property
    def answer(self) -> str:
        return answer_text(self.messages[-1])

    def is_right(self, answer: str) -> bool:
        return self.accepts(answer) if self.accepts else answer.strip() == self.answer

    def prompt(self) -> list[Message]:
        """What comes before the answer, with the system prompt where there is one."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages[:-1]]


def ask(skill: str, question: str, answer: str, **options: Any) -> Task:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Task(skill, messages, **options)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    return f'<tool_call>\n{{"name": {dump(name)}, "arguments": {dump(arguments)}}}\n</tool_call>'


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def answer_text(message: Message) -> str:
    """What the assistant writes for a message, without the tokens around it."""
    calls = "\n".join(call_text(call["name"], call["arguments"]) for call in message.get("tool_calls", ()))
    return "\n".join(part for part in (message.get("content") or "", calls) if part)


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    system, rest = DEFAULT_SYSTEM, messages
    if messages and messages[0]["role"] == "system":
        system, rest = messages[0]["content"], messages[1:]
    parts = [f"<|im_start|>system\n{system}"]
    if tools:
        parts += [TOOLS_BEFORE, *(f"\n{dump(tool)}" for tool in tools), TOOLS_AFTER]
    parts.append("<|im_end|>\n")
    for i, message in enumerate(rest):
        if message["role"] == "tool":
            if i == 0 or rest[i - 1]["role"] != "tool":
                parts.append("<|im_start|>user")
            parts.append(f"\n<tool_response>\n{message['content']}\n</tool_response>")
            if i + 1 == len(rest) or rest[i + 1]["role"] != "tool":
                parts.append("<|im_end|>\n")
        elif message["role"] == "assistant":
            parts.append(f"<|im_start|>assistant\n{answer_text(message)}<|im_end|>\n")
        else:
            parts.append(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n")
    if add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)
