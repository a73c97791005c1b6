"""The folder for caches, whatever the environment says about the user's home."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Any

import pytest

from motley.bench.random_model import random_model_path
from motley.caches import cache_folder
from motley.cli.doctor import PROBLEM, check_installation
from motley.cli.hub import _mark_of
from motley.errors import ConfigError
from motley.runtime.hosts.streaming import default_cache


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a user who is not in the system's list, as in a container, without HOME."""

    def unknown(_: int) -> Any:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.mark.parametrize(
    ("variable", "home", "expected"),
    [
        ("/caches", "/home/ada", "/caches/motley"),
        ("", "/home/ada", "/home/ada/.cache/motley"),
        ("here", "/home/ada", "/home/ada/.cache/motley"),  # relative
        ("/caches", "", "/caches/motley"),
    ],
)
def test_all_caches_are_in_one_folder(
    variable: str, home: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    monkeypatch.setenv("HOME", home)
    assert cache_folder() == Path(expected)
    assert default_cache().parent == random_model_path("llama-15m", "Q8_0").parent == cache_folder()


def test_a_relative_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "here")
    with pytest.raises(ConfigError, match="no folder for caches"):
        cache_folder()


def test_a_user_without_a_home_is_told_what_to_set(
    homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for find in (cache_folder, default_cache, lambda: random_model_path("llama-15m", "Q8_0")):
        with pytest.raises(ConfigError, match="HOME names no folder") as caught:
            find()
        assert "XDG_CACHE_HOME" in (caught.value.hint or "")
    found = {finding.subject: finding for finding in check_installation()}
    assert found["cache folder"].state == PROBLEM
    assert not list(tmp_path.iterdir())  # no folder that is called ~


def test_a_mark_that_cannot_be_read_is_none(
    homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = "0" * 64
    assert _mark_of(checksum) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _mark_of(checksum) is None
    (tmp_path / "motley/verified").mkdir(parents=True)
    (tmp_path / "motley/verified" / checksum).write_bytes(b"\xff")
    assert _mark_of(checksum) is None
