"""Tests on a real GPU: `make test-gpu`. Everywhere else they say why they do not run.

They are a process of their own: whether Triton compiles or interprets is decided when it is imported, and the other
tests of the cuda backend interpret.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import motley
from motley import LLM

MODEL = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "needs an NVIDIA GPU"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "Triton interprets in this process; `make test-gpu` runs these"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


Load = Callable[..., LLM]


@pytest.fixture
def load() -> Iterator[Load]:
    """The bundled model with options of `LLM`, closed after the test. All its kernels are compiled."""
    with ExitStack() as stack:
        plain: dict[str, Any] = {"devices": "cuda:0", "n_ctx": 512, "n_parallel": 8, "prefix_cache": False}

        def load(**options: Any) -> LLM:
            llm = stack.enter_context(LLM(MODEL, **plain | options))
            llm.finish_compiling()  # otherwise steps have few rows, and no drafts, for some seconds
            return llm

        yield load
