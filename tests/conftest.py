"""Shared fixtures. Reference data lives beside the repository; without it the tests that need it say so and skip."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from motley.bundled import bundled_model_path
from motley.engine.drafting import choice
from random_models import GEMMA3, LLAMA, NARROW

# A shell's background job ignores Ctrl-C, but the tests of it need the signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tensors of tests are tiny: more threads only wait for each other, here and in the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test asserts a time: on a busy machine, any example may be slow. `timeout` in pyproject.toml ends what hangs.
settings.register_profile("motley", deadline=None)
settings.load_profile("motley")

# How many tokens a step guesses depends on measured times. Where other numbers of rows round differently, so would a
# text: tests choose drafters themselves.
choice.DEFAULT = choice.OFF

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data next to the checkout."""
    if not SHARED.is_dir():
        pytest.skip(
            f"no reference data at {SHARED.parent.name}/shared: tests against goldens and corpora are skipped"
        )
    return SHARED


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The trained model that comes with Motley: 8 layers, 4 KV heads of 64 dims, 4,096 tokens."""
    return bundled_model_path()


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without meaning, smaller than the bundled one: 4 layers, 2 KV heads of 64 dims."""
    return LLAMA.write(tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.fixture(scope="session")
def random_narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without meaning whose heads of 24 dims no rotation fits: 2 layers, 2 KV heads."""
    return NARROW.write(tmp_path_factory.mktemp("models") / "narrow.gguf")


@pytest.fixture(scope="session")
def random_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without meaning with sliding windows: 6 layers, five of which see 32 tokens."""
    return GEMMA3.write(tmp_path_factory.mktemp("models") / "gemma3.gguf")
