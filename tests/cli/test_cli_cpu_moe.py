"""--n-cpu-moe, --cpu-moe and --expert-split through the commands; tests/runtime/test_experts_apart.py has the rest."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from motley.bundled import bundled_experts_path, bundled_model_path

Motley = Callable[..., Result]
MODEL = str(bundled_experts_path())
TWO = ("--device", "cpu,cpu")
PROMPT = ("-p", "Once upon a time", "-n", "6", "--temp", "0", "-no-cnv", "-c", "64")


def run(motley: Motley, *args: str) -> Result:
    result = motley(*args)
    assert result.exit_code == 0, result.stderr
    return result


def test_run_answers_as_one_device_does(motley: Motley) -> None:
    alone = run(motley, "run", MODEL, *PROMPT).stdout
    for flags in ("-ncmoe 3", "--cpu-moe", "--n-cpu-moe 2 --split-mode layer", "--n-cpu-moe auto"):
        assert run(motley, "run", MODEL, *PROMPT, *TWO, *flags.split()).stdout == alone
    run(motley, "run", MODEL, *PROMPT, *TWO, "--expert-split", "1,3")


def test_explain_shows_where_experts_are_and_two_hand_overs_a_layer(motley: Motley) -> None:
    shown = run(motley, "explain", MODEL, *TWO, "-cmoe").stdout
    assert "routed experts of the first 6 layers: on cpu#1" in shown
    assert "12 send" in shown
    contents = json.loads(run(motley, "explain", MODEL, *TWO, "-ncmoe", "4", "--json").stdout)
    assert contents["collectives"] == {"send": 8, "broadcast": 1}
    assert [device["kv_heads"] for device in contents["devices"]] == [12, 0]
    automatic = ("--n-cpu-moe", "auto", "--device-memory", "9MiB,1GiB", "-c", "64")
    chosen = json.loads(run(motley, "explain", MODEL, *TWO, *automatic, "--json").stdout)
    assert 0 < chosen["collectives"]["send"] < 12


def test_kv_and_bench_take_them(motley: Motley) -> None:
    rows = json.loads(run(motley, "kv", MODEL, *TWO, "-cmoe", "-c", "64", "--json").stdout)
    assert [device["reserved"] > 0 for device in rows["devices"]] == [True, False]
    run(motley, "bench", MODEL, *TWO, "-ncmoe", "3", "-p", "4", "-n", "2", "-r", "1", "--json")


def test_a_cpu_alone_says_that_they_have_no_effect(motley: Motley) -> None:
    for device in ("cpu", "auto"):
        result = run(motley, "run", MODEL, *PROMPT, "--device", device, "-ncmoe", "3")
        assert "note: no effect here: --n-cpu-moe or --cpu-moe (the CPU is the only device)" in result.stderr


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--device cpu", "the CPU is the only device"),
        ("--device cpu,cpu", "only --split-mode tensor cuts experts"),
        ("--device cpu,cpu -sm tensor", ""),
        ("--device (cpu,cpu)", ""),
        ("--device cpu,cpu,cpu -ncmoe 2", ""),
    ],
)
def test_a_way_to_split_experts_without_effect_is_noted(motley: Motley, flags: str, why: str) -> None:
    said = motley("run", MODEL, *PROMPT, *flags.split(), "--split-experts", "whole").stderr
    assert (f"note: no effect here: --split-experts ({why})" in said) == bool(why)
    assert ("no effect here" in said) == bool(why)


@pytest.mark.parametrize(
    ("model", "flags", "error", "hint"),
    [
        (MODEL, "--n-cpu-moe some", "--n-cpu-moe 'some' is not a number of layers", "for example 20"),
        (MODEL, "--n-cpu-moe -1", "--n-cpu-moe '-1' is not a number of layers", "for example 20"),
        (MODEL, "--n-cpu-moe 2 --cpu-moe", "two numbers", "give one of them"),
        (MODEL, "--cpu-moe --expert-split 1", "expert split '1' has 1 numbers", "one for each device"),
        (MODEL, "--cpu-moe -sm none", "split mode none", "leave out --split-mode"),
        (str(bundled_model_path()), "--cpu-moe", "the model has no experts", "--cpu-moe"),
    ],
)
def test_impossible_wishes_are_refused(motley: Motley, model: str, flags: str, error: str, hint: str) -> None:
    result = motley("run", model, *PROMPT, *TWO, *flags.split())
    assert result.exit_code == 2
    said = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert error in said[0]
    assert hint in said[1]
