"""A conversation with a model: what was said, and what of it fits into the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motley.cli.painting import make_painter
from motley.cli.report import say
from motley.cli.streaming import print_stream
from motley.engine import Completion, SamplingParams
from motley.errors import ConfigError
from motley.llm import LLM
from motley.text.template import KEY as CHAT_TEMPLATE

Message = dict[str, str]

_ANSWER_PART = 4  # a quarter of the context is kept free for the answer
_MARGIN = 16  # tokens that an answer needs at least


@dataclass
class Turn:
    """A message and its answer."""

    text: str
    answer: str

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.text}, {"role": "assistant", "content": self.answer}]


class Conversation:
    """Sends text to a model: through its chat template, with the turns before it, or as text to continue."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        use_template: bool | None = None,
        renders_markdown: bool = False,
    ) -> None:
        """`use_template` None: use a template if the model file has one; True: use a generic one if it has none."""
        self.is_chat = CHAT_TEMPLATE in llm.spec.metadata if use_template is None else use_template
        if system is not None and not self.is_chat:
            raise ConfigError("a system prompt needs a chat", hint="add -cnv, or put it into the text")
        self.llm = llm
        self.params = params
        self.system = system
        self.turns: list[Turn] = []
        self.renders_markdown = renders_markdown
        self.last: Completion | None = None  # the latest answer
        self.prompt_tokens: list[int] = []  # of the latest prompt

    def clear(self) -> None:
        self.turns = []

    def answer(self, text: str) -> Completion:
        """The whole answer at once; it is not added to the conversation."""
        if self.is_chat:
            self.prompt_tokens = self._encoded(self.messages(text))
            self.last = self.llm.chat(self.messages(text), params=self.params)
        else:
            self.prompt_tokens = self.llm.tokenizer.encode(text)
            self.last = self.llm.generate(text, params=self.params)
        return self.last

    def print_answer(self, text: str) -> Completion:
        """Streams the answer to standard output, and adds `text` and the answer to the conversation."""
        if not self.is_chat:
            painter = make_painter(renders_markdown=self.renders_markdown)
            self.prompt_tokens = self.llm.tokenizer.encode(text)
            self.last = print_stream(self.llm.stream(text, params=self.params), painter)
        else:
            self._make_room(text)
            messages = self.messages(text)
            self.prompt_tokens = self._encoded(messages)
            painter = make_painter(
                renders_markdown=self.renders_markdown, starts_in_thought=self._starts_in_thought(messages)
            )
            self.last = print_stream(self.llm.stream_chat(messages, params=self.params), painter)
        self.turns.append(Turn(text, self.last.text))
        return self.last

    def messages(self, text: str | None = None) -> list[Message]:
        """The messages so far, and `text` as the user's next one."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = [message for turn in self.turns for message in turn.messages]
        return [*system, *said, *([] if text is None else [{"role": "user", "content": text}])]

    def all_tokens(self) -> list[int]:
        """The tokens of the latest prompt and its answer."""
        return [*self.prompt_tokens, *(() if self.last is None else self.last.tokens)]

    def _encoded(self, messages: Sequence[Message]) -> list[int]:
        return self.llm.tokenizer.encode_marked(self.llm.chat_template.render_marked(messages))

    def _make_room(self, text: str) -> None:
        """Drops the oldest turns, whole, until the rest and an answer fit into the context."""
        n_ctx, limit = self.llm.n_ctx, self.params.max_tokens or self.llm.n_ctx
        n_free = _MARGIN if self.params.context_shift else max(_MARGIN, min(limit, n_ctx // _ANSWER_PART))
        n_before = len(self.turns)
        while self.turns and len(self._encoded(self.messages(text))) + n_free > n_ctx:
            del self.turns[0]  # a pair of messages: templates want the roles to alternate
        if n_dropped := n_before - len(self.turns):
            turns = "the oldest turn was" if n_dropped == 1 else f"the {n_dropped} oldest turns were"
            kept = "" if self.system is None else "; the system prompt is kept"
            say(f"note: the context of {n_ctx} tokens is full: {turns} dropped{kept}")

    def _starts_in_thought(self, messages: Sequence[Message]) -> bool:
        """Whether the template itself opens a thought."""
        rendered: Any = self.llm.chat_template.render(messages)
        return bool(str(rendered).rstrip().endswith("<think>"))
