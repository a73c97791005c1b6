"""A model that says what it is told to, so that the commands are tested without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from motley.engine import Completion, SamplingParams, Timings
from motley.errors import MotleyError
from motley.runtime.warm_up import WarmUp

TIMINGS = Timings(prompt_tokens=5, cached_tokens=1, prompt_seconds=0.5, new_tokens=4, new_seconds=0.25)
CHAT_SPEC = SimpleNamespace(metadata={"tokenizer.chat_template": "…"})


class FakeStream:
    def __init__(self, pieces: Sequence[str], before_piece: Callable[[int], None]) -> None:
        self.completion = Completion("".join(pieces), (7, 8, 9), "stop", TIMINGS)
        self._pieces = pieces
        self._n_read = 0
        self._before_piece = before_piece

    def until(self, is_enough: Callable[[], bool]) -> Iterator[str]:
        for index, piece in enumerate(self._pieces):
            if is_enough():
                return
            self._before_piece(index)
            self._n_read += 1
            yield piece

    def close(self) -> None:
        if self._n_read < len(self._pieces):
            self.completion = Completion("".join(self._pieces[: self._n_read]), (7,), "cancelled", TIMINGS)


class FakeTokenizer:
    """One token per character; 1 begins a text."""

    bos_id = 1
    adds_bos = True

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [self.bos_id] * add_special + [ord(char) % 32 for char in text]

    def encode_marked(self, text: str) -> list[int]:
        return self.encode(text)


class FakeTemplate:
    """A line for each message; `opens_thought`: the answer begins in <think>."""

    def __init__(self, opens_thought: bool = False) -> None:
        self.end = "<think>" if opens_thought else ""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{m['role']}:{m['content']}\n" for m in messages) + self.end

    render_marked = render


@dataclass
class FakeLLM:
    """Answers every request with `pieces` and notes what it was asked."""

    pieces: Sequence[str] = ("Hello", ", ", "wörld")
    spec: Any = field(default_factory=lambda: SimpleNamespace(metadata={}))
    n_ctx: int = 4096
    load_seconds: float = 1.5
    warm_up: WarmUp = field(default_factory=WarmUp)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    chat_template: FakeTemplate = field(default_factory=FakeTemplate)
    before_piece: Callable[[int], None] = lambda index: None
    error: MotleyError | None = None  # what the next request raises
    # What was asked.
    path: Path | None = None
    options: Any = None
    params: SamplingParams = field(default_factory=SamplingParams)
    prompts: list[Any] = field(default_factory=list)
    is_closed: bool = False
    saved: dict[str, list[int]] = field(default_factory=dict)  # sessions, by file

    def save_session(self, path: Path, tokens: Sequence[int]) -> int:
        path.write_bytes(b"session")
        self.saved[path.name] = list(tokens)
        return 7

    def load_session(self, path: Path) -> list[int]:
        self.prompts.append(f"load {path.name}")
        return self.saved.get(path.name, [1, 2])

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def _note(self, prompt: Any, params: SamplingParams) -> None:
        self.prompts.append(prompt)
        self.params = params
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def generate(self, prompt: str, *, params: SamplingParams) -> Completion:
        self._note(prompt, params)
        return FakeStream(self.pieces, self.before_piece).completion

    def stream(self, prompt: str, *, params: SamplingParams) -> FakeStream:
        self._note(prompt, params)
        return FakeStream(self.pieces, self.before_piece)

    chat = generate
    stream_chat = stream

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The next token is the same one again with probability 1/2, and any of the 31 others equally."""
        table = np.full((len(tokens), 32), np.log(0.5 / 31), dtype=np.float32)
        table[np.arange(len(tokens)), np.asarray(tokens)] = np.log(0.5)
        self.prompts.append(list(tokens))
        return table

    def memory(self) -> dict[str, int]:
        return {"weights": 3 << 20, "kv_cache": 1 << 20, "activations": 512}
