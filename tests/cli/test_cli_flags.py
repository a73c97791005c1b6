"""Flags: llama.cpp's habits, usage errors in two lines, help that fits a terminal."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_llm import FakeLLM
from rich.text import Text
from terminal import Terminal
from typer.testing import Result

from motley.cli.arguments import read_words
from motley.cli.commands import COMMANDS, load_command
from motley.cli.placement import Places, place_layers
from motley.errors import ConfigError, MotleyError

Motley = Callable[..., Result]


def test_the_flags_of_a_llama_cpp_user_work_in_a_process() -> None:
    flags = "-ngl 99 -np 2 -fa on -mg 0 --no-mmap -b 256 -ub 64 -t 1 --jinja -co -n 2"
    command = [sys.executable, "-m", "motley", "run", *flags.split(), "-p", "Once"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    notices = [line for line in result.stderr.splitlines() if "no effect here" in line]
    assert len(notices) == 2  # one is about flags, one about this machine
    for flag in ("-fa on (", "--no-mmap (", "--jinja (", "-co ("):
        assert flag in notices[0]
    assert notices[1] == "note: no effect here: -ngl 99, -mg 0 (no GPU was found)"


def test_meaningful_flags_reach_their_place(motley: Motley, llm: FakeLLM, model: str) -> None:
    assert motley("run", model, "-p", "x", "-np", "2", "-b", "512", "-ub", "128").exit_code == 0
    assert (llm.options.parallel, llm.options.n_batch) == (2, 128)
    assert motley("run", model, "-p", "x", "-b", "64").exit_code == 0
    assert llm.options.n_batch == 64


def test_escapes_are_read_on_request(motley: Motley, llm: FakeLLM, model: str) -> None:
    motley("run", model, "-p", r"a\nb\tc\x41\q\\", "-e")
    motley("run", model, "-p", r"a\nb")
    assert llm.prompts == ["a\nb\tcA\\q\\", r"a\nb"]


@pytest.mark.parametrize(
    ("flag", "alike"), [("-nglx", "-ngl"), ("--temprature", "--temperature"), ("-xyz", ""), ("-ptext", "")]
)
def test_a_flag_of_several_letters_is_never_a_short_one_with_a_value(
    motley: Motley, llm: FakeLLM, model: str, flag: str, alike: str
) -> None:
    result = motley("run", model, flag)
    assert result.exit_code == 2
    error, hint = result.stderr.splitlines()
    assert error == f"error: unknown flag {flag}"
    assert hint.startswith("hint: ")
    assert alike in hint
    assert "motley run --help" in hint
    assert llm.prompts == []


def test_values_that_look_like_flags_are_values() -> None:
    known = {"-p": True, "-n": True, "-c": True, "--json": False}
    line = read_words(["-p", "-fa", "-n", "-1", "-c128", "--json", "--", "-x"], known, "motley run")
    assert line.words == ["-p", "-fa", "-n", "-1", "-c", "128", "--json", "--", "-x"]
    assert line.notice is None
    assert line.values == {"-p": "-fa", "-n": "-1", "-c": "128", "--json": ""}


def test_flags_of_llama_cpp_for_drafts_work_or_are_noted(motley: Motley, llm: FakeLLM, model: str) -> None:
    flags = (
        f"-md {model} --spec-draft-n-max 5 --spec-draft-n-min 2 --draft-p-min 0.7 -ngld 99 -cd 512 -ctkd q8_0"
    )
    result = motley("run", model, "-p", "x", *flags.split(), "--spec-ngram-size-n", "24")
    assert result.exit_code == 0, result.output
    assert (llm.options.draft_max, llm.options.draft_min) == (5, 2)
    for flag in (
        "--draft-p-min 0.7 (",
        "-ngld 99 (",
        "-cd 512 (",
        "-ctkd q8_0 (",
        "--spec-ngram-size-n 24 (",
    ):
        assert flag in result.stderr


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (("run", "-n", "many"), "-n 'many' is not a whole number", "motley run --help lists the flags"),
        (("run", "-c", "-3"), "-c '-3' must be at least 0", "motley run --help"),
        (("run", "--temp", "hot"), "--temp 'hot' is not a number", "motley run --help"),
        (("run", "-m"), "option '-m' requires an argument", "--help"),
        (("run", "-n", "1e2"), "-n '1e2' is not a whole number", "motley run --help lists the flags"),
        (("run", "-hf"), "option '-hf' requires an argument", "motley run --help lists the flags"),
        (("-x",), "unknown flag -x", "motley --help lists the commands"),
        (
            ("run", "-p", "x", "-n", "9" * 20),
            f"-n {'9' * 20} is not possible",
            "-n must be an integer from 1",
        ),
        (("run", "-p", "x", "--on-loss", "cry"), "--on-loss is 'cry'", "there are: wait, fail"),
        (("run", "-ngl", "some"), "-ngl 'some' is not a number of layers", "for example 20"),
        (("runn",), "no such command 'runn'", "motley --help lists the commands"),
        (("tokenize", "a", "b"), "unexpected argument: b", "motley tokenize --help"),
        (("run", "-p", "x", "-n", "0"), "-n 0 is not possible", "-n must be an integer >= 1"),
        (("run", "-p", "x", "--top-p", "2"), "--top-p 2.0 is not possible", "--top-p must be a number from"),
    ],
)
def test_a_usage_error_has_the_same_two_lines(
    motley: Motley, args: tuple[str, ...], error: str, hint: str
) -> None:
    result = motley(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first == f"error: {error}"
    assert second.startswith("hint: ")
    assert hint in second


@pytest.mark.parametrize(
    "args", [("run", "-n", "many"), ("run", "-p", "x", "-n", "0"), ("inspect", "nowhere"), ("run",)]
)
def test_under_json_an_error_is_an_object_on_stdout(motley: Motley, args: tuple[str, ...]) -> None:
    result = motley(*args, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert set(error) == {"type", "message", "hint"}
    assert f"error: {error['message']}\n" in result.stderr


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns_and_names_every_flag(motley: Motley, name: str) -> None:
    result = motley(*([name] if name else []), "--help")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search(r"--[\w-]*…", result.stdout)
    assert not re.search(r"\\b|\[/|\[bold", result.stdout)  # markup that was not read
    assert not re.search("[│╭╯]|<bool>|<int|VALUE", result.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_help_are_lines_that_can_be_copied(name: str) -> None:
    for paragraph in inspect.cleandoc(load_command(name).help).split("\n\n"):
        if paragraph.startswith("\b"):
            lines = [Text.from_markup(line).plain for line in paragraph.splitlines()[1:]]
            assert max(map(len, lines)) <= 78, lines  # the rest of a line would begin the next one
            if not name.endswith("-quality"):  # they also have a table
                assert all(line.startswith(("motley ", "cat ")) for line in lines)


def test_an_argument_that_is_needed_has_no_brackets(motley: Motley) -> None:
    assert motley("rm", "--help").stdout.startswith("Usage: motley rm [OPTIONS] NAME\n")
    assert motley("kv", "--help").stdout.startswith("Usage: motley kv [OPTIONS] [MODEL]\n")


def test_help_in_a_terminal_of_80_columns() -> None:
    with Terminal("run", "--help") as terminal:
        assert terminal.wait() == 0
        assert "--kv-cache-demand-paged" in terminal.text
        assert max(map(len, terminal.text.splitlines())) <= 80


ASKED = Places("auto", None, None)


def test_gpu_layers_are_devices_and_proportions(random_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(layers: str | None, gpu: int | None = None, asked: Places = ASKED) -> Places:
        return place_layers(random_llama, asked, layers, gpu)

    monkeypatch.setattr("motley.cli.placement.known_devices", lambda: ("cpu", "cuda:0", "cuda:1"))
    assert place("2", 1) == Places("cpu,cuda:1", "layer", "2,2")
    assert place("3") == Places("cpu,cuda:0,cuda:1", "layer", "1,3/2,3/2")
    assert place("2", asked=Places("auto", None, "3,1")) == Places("cpu,cuda:0,cuda:1", "layer", "2,3/2,1/2")
    assert place("1", asked=Places("cuda:1", None, None)) == Places("cpu,cuda:1", "layer", "3,1")
    assert place("99") == place("all") == ASKED
    assert place("0") == Places("cpu", None, None)
    assert place(None, 1) == Places("cuda:1", None, None)
    with pytest.raises(ConfigError, match="there is no such GPU"):
        place(None, 2)
    with pytest.raises(ConfigError, match="-ngl 2 of 4 layers with --split-mode tensor"):
        place("2", asked=Places("auto", "tensor", None))
    with pytest.raises(MotleyError, match="-ngl 2 beside --device cuda:0,cpu"):
        place("2", asked=Places("cuda:0,cpu", None, None))


def test_explain_shows_where_gpu_layers_are(
    motley: Motley, random_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("cli.placement", "runtime.crew", "runtime.defaults"):
        monkeypatch.setattr(f"motley.{module}.known_devices", lambda: ("cpu", "cuda:0"))
    result = motley("explain", str(random_llama), "-ngl", "3", "--json")
    assert result.exit_code == 0, result.output
    contents = json.loads(result.stdout)
    assert [device["device"] for device in contents["devices"]] == ["cpu", "cuda:0"]
    assert [device["kv_heads"] for device in contents["devices"]] == [2, 6]
