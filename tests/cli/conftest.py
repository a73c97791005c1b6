"""Fixtures for the commands: a fake model in place of the one they load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from hub_machine import Machine, repositories
from stand_in_hub import StandInHub
from typer.testing import CliRunner, Result

from motley.cli import app


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The model that every command loads in this test."""
    fake = FakeLLM()

    def load(path: Path, options: Any) -> FakeLLM:
        fake.path, fake.options = path, options
        return fake

    monkeypatch.setattr("motley.cli.run.load", load)
    monkeypatch.setattr("motley.cli.perplexity.load", load)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file to name as MODEL."""
    path = tmp_path / "model.gguf"
    path.touch()
    return str(path)


@pytest.fixture
def motley() -> Callable[..., Result]:
    """`motley("run", "-p", "Hi")` is the command's result."""

    def invoke(*args: str, stdin: str = "") -> Result:
        return CliRunner().invoke(app, list(args), input=stdin, prog_name="motley")

    return invoke


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with StandInHub(repositories(), gated=frozenset({"ada/secret-GGUF"})) as hub:
        yield Machine(hub, tmp_path / "hf")
