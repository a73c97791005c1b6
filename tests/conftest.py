"""Shared fixtures. Reference data lives beside the repository; without it the tests that need it say so and skip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the tensors of tests are tiny: more threads only wait for each other

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data next to the checkout."""
    if not SHARED.is_dir():
        pytest.skip(
            f"no reference data at {SHARED.parent.name}/shared: tests against goldens and corpora are skipped"
        )
    return SHARED
