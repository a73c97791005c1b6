"""Open a model for a command, with a progress bar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motley.cli.console import loading_bar
from motley.llm import LLM


@dataclass(frozen=True)
class LoadOptions:
    """The flags that `motley.LLM` takes."""

    ctx_size: int  # 0: the model's own
    cache_type_k: str
    cache_type_v: str
    backend: str
    threads: int | None


def load(path: Path, options: LoadOptions) -> LLM:
    with loading_bar(f"Loading {path.name}") as progress:
        return LLM(
            path,
            n_ctx=options.ctx_size or None,
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            backend=options.backend,
            n_threads=options.threads,
            n_parallel=1,  # a command has one sequence, and memory for no more
            progress=progress,
        )
