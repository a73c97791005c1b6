"""The settings of `motley serve`, as one object."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motley.engine.params import SamplingParams
from motley.errors import ConfigError

_REASONING_FORMATS = ("none", "deepseek", "deepseek-legacy", "auto")
_REASONING = ("on", "off", "auto")


@dataclass(frozen=True)
class Limits:
    """The limits of one request."""

    head_bytes: int = 64 * 2**10
    head_seconds: float = 30.0  # until the head of a request is complete
    body_bytes: int = 64 * 2**20
    n_choices: int = 128
    n_prompts: int = 256
    n_probs: int = 200
    n_messages: int = 10_000
    n_stops: int = 256
    stop_chars: int = 4096
    n_biases: int = 100_000
    kwargs_chars: int = 64 * 2**10
    body_seconds: float = 60.0  # to receive a body
    stalled_seconds: float = 120.0  # a reader that takes nothing for so long is dropped


@dataclass(frozen=True)
class ServerSettings:
    """Flags of the server. Those of the model are `engine_arguments`."""

    model: Path
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    defaults: SamplingParams = field(default_factory=SamplingParams)
    n_predict: int = -1  # tokens of an answer where the request does not say; -1: until the context is full
    chat_template: str | None = None
    reasoning_format: str = "auto"
    reasoning: str = "auto"
    has_metrics: bool = False
    has_slots: bool = True
    has_page: bool = True
    slot_save_path: Path | None = None
    pooling: str | None = None
    cors_origins: tuple[str, ...] = ("*",)
    is_verbose: bool = False
    logs_prompts: bool = False
    restarts: bool = False
    engine_command: tuple[str, ...] | None = None  # what to start instead of the engine process
    max_queue: int = 1024  # requests that wait beside those that run
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        """ConfigError for values that the server would only notice with a request, or never."""
        _require_one_of("--reasoning-format", self.reasoning_format, _REASONING_FORMATS)
        _require_one_of("--reasoning", self.reasoning, _REASONING)
        if self.pooling is not None:
            from motley.engine.embedding import POOLINGS  # here: it needs numpy

            _require_one_of("--pooling", self.pooling, POOLINGS)
        if self.n_predict < -1:
            raise ConfigError(f"-n {self.n_predict} is not possible", hint="-n must be an integer >= -1")
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            raise ConfigError(
                f"--slot-save-path {self.slot_save_path} is not a folder", hint="make the folder first"
            )

    @property
    def model_name(self) -> str:
        """The id that clients see: the first alias by the alphabet, or the file's name."""
        return min(self.aliases) if self.aliases else self.model.name


def _require_one_of(flag: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} {value!r} is unknown", hint=f"there are: {', '.join(known)}")
