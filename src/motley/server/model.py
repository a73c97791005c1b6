"""The front's view of the model: its tokenizer, chat template and metadata. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from motley.gguf import Metadata, read_metadata
from motley.server.settings import ServerSettings
from motley.text import ChatTemplate, Tokenizer
from motley.text.named_templates import named_template
from motley.text.template import CHATML, KEY
from motley.text.tools import ChatFormat

T = TypeVar("T")

_LONG = 2_000  # characters: longer texts are tokenized in a thread, so that the event loop continues
_HUGE = 2**20  # longer ones one at a time: each takes 60 bytes of memory for a character

# Tokens for infilling: their keys in a file, and the texts that vocabularies give them.
_FIM = {
    "pre": (
        ("fim_pre", "prefix"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> ▁<PRE> <｜fim▁begin｜> <|code_prefix|>",
    ),
    "suf": (
        ("fim_suf", "suffix"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> ▁<SUF> <｜fim▁hole｜> <|code_suffix|>",
    ),
    "mid": (
        ("fim_mid", "middle"),
        "<|fim_middle|> <fim-middle> <fim_middle> <MID> ▁<MID> <｜fim▁end｜> <|code_middle|>",
    ),
    "rep": (("fim_rep",), "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "sep": (("fim_sep",), "<|file_sep|>"),
}


@dataclass(frozen=True)
class FrontModel:
    """Immutable; made once, in a thread, while the engine loads."""

    metadata: Metadata
    tokenizer: Tokenizer
    template: ChatTemplate
    chat_format: ChatFormat
    architecture: str
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def read(cls, settings: ServerSettings) -> FrontModel:
        metadata = read_metadata(settings.model)
        tokenizer = Tokenizer.from_metadata(metadata)
        template = _template(metadata, settings.chat_template)

        def control_id(text: str) -> int | None:
            token = tokenizer.token_id(text)
            return token if token in tokenizer.control_ids else None

        return cls(
            metadata,
            tokenizer,
            template,
            ChatFormat(template, special_id=control_id),
            metadata.str("general.architecture"),
        )

    @property
    def n_ctx_train(self) -> int:
        return self.metadata.int(f"{self.architecture}.context_length", 0)

    @property
    def n_embd(self) -> int:
        return self.metadata.int(f"{self.architecture}.embedding_length", 0)

    @cached_property
    def fim(self) -> Mapping[str, int]:
        """Ids of the tokens for infilling, as far as there are any: pre, suf, mid, rep, sep."""
        found = {}
        for name, (keys, texts) in _FIM.items():
            ids = [self.metadata.int(f"tokenizer.ggml.{key}_token_id", None) for key in keys]
            ids += [self.tokenizer.token_id(text) for text in texts.split()]
            token = next((token for token in ids if token is not None), None)
            if token is not None:
                found[name] = token
        return found

    def show(self, tokens: list[int] | tuple[int, ...]) -> str:
        """The text of tokens, special ones written out."""
        return self.tokenizer.decode(tokens, skip_special=False)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token in the vocabulary: a text of n has at least n / longest_token tokens."""
        tokenizer = self.tokenizer
        return max((len(tokenizer.token_text(token)) for token in range(tokenizer.n_vocab)), default=1)

    async def in_thread_if_long(self, n_chars: int, work: Callable[[], T]) -> T:
        """The result of `work` over so many characters (or tokens)."""
        if n_chars < _LONG:
            return work()
        if n_chars < _HUGE:
            return await asyncio.to_thread(work)
        async with self.one_at_a_time:
            return await asyncio.to_thread(work)


def _template(metadata: Mapping[str, Any], chosen: str | None) -> ChatTemplate:
    """The chosen one, or the file's, or ChatML."""
    if chosen is None and KEY in metadata:
        return ChatTemplate.from_metadata(metadata)
    source, stops = (CHATML, ("<|im_end|>",)) if chosen is None else named_template(chosen)
    return ChatTemplate.from_source(source, metadata, stops=stops)
