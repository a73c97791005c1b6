"""One server for each module, with the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import RunningServer


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("-c", "512", "-np", "4", "-t", "1", "--metrics", "--seed", "42") as running:
        yield running.wait_until_ready()
