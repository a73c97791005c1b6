"""--prompt-cache: the KV cache of a prompt in a file, so that the next process need not compute it."""

from __future__ import annotations

from dataclasses import dataclass

from motley.cli.conversation import Conversation
from motley.cli.options.text import PromptCache, PromptCacheAll, PromptCacheReadOnly
from motley.cli.report import say
from motley.errors import ConfigError
from motley.units import show_bytes


@dataclass(frozen=True)
class PromptCacheOptions:
    """The flags of a session file."""

    prompt_cache: PromptCache = None
    prompt_cache_all: PromptCacheAll = False
    prompt_cache_ro: PromptCacheReadOnly = False

    def load(self, conversation: Conversation) -> None:
        """Reads the file, if there is one."""
        path = self.prompt_cache
        if path is None:
            return
        if path.is_dir():
            raise ConfigError(f"--prompt-cache {path} is a folder", hint="give the name of a file")
        if path.exists():
            n_tokens = len(conversation.llm.load_session(path))
            say(f"prompt cache: read {n_tokens} tokens from {path}")

    def save(self, conversation: Conversation, *, is_chat: bool) -> None:
        """Writes the cache of the latest prompt; of a chat, or with --prompt-cache-all, also that of its answer."""
        if self.prompt_cache is None or self.prompt_cache_ro or not conversation.prompt_tokens:
            return
        holds_answer = is_chat or self.prompt_cache_all
        tokens = conversation.all_tokens() if holds_answer else conversation.prompt_tokens
        n_bytes = conversation.llm.save_session(self.prompt_cache, tokens)
        say(f"prompt cache: wrote {len(tokens)} tokens to {self.prompt_cache} ({show_bytes(n_bytes)})")
