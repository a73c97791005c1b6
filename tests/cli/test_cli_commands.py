"""The list of commands: true, and there without waiting for torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module

import pytest
from typer.testing import Result

import motley as package
from motley.cli.commands import COMMANDS, load_command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_a_command_says_itself(name: str) -> None:
    assert load_command(name).help.splitlines()[0] == COMMANDS[name][1]


def test_help_and_version_do_not_import_torch() -> None:
    program = """
import sys
from typer.testing import CliRunner
from motley.cli import app
for flags in (["--help"], ["--version"], ["no-such-command"]):
    CliRunner().invoke(app, flags)
print("torch" in sys.modules)
print(CliRunner().invoke(app, ["--help"]).stdout)
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("False\n")
    assert "kv-quality" in shown


def test_an_unknown_command_is_refused(motley: Callable[..., Result]) -> None:
    result = motley("runn")
    assert result.exit_code == 2
    assert "error: no such command 'runn'\nhint: did you mean 'run'? motley --help" in result.output


def test_the_package_gives_what_it_promises_and_nothing_else() -> None:
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="module 'motley' has no attribute 'LLMs'"):
        _ = import_module("motley").LLMs
