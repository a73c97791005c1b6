"""What commands say about devices and compiled kernels: `motley warm`, and the report while a model is loaded."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM as OtherFakeLLM
from rich.console import Console
from typer.testing import Result

from motley import llm as llm_module
from motley.cli import console, warm
from motley.cli.console import loading_bar
from motley.cli.loading import load
from motley.cli.options.loading import LoadOptions
from motley.runtime import crew, defaults
from motley.runtime.crew import make_crew
from motley.runtime.warm_up import WarmUp

Motley = Callable[..., Result]

COMPILED = WarmUp(
    (("_matmul", 2.0), ("_norm", 0.5), ("_matmul", 1.25)), 1.5, ("_gate: no memory",), n_others=3
)
ALL_COMPILED = WarmUp((("_norm", 0.5), ("_choose", 2.5)), 4.0)


class FakeLLM:
    """Notes how it is made, and chooses its devices as a model would."""

    made: list[dict[str, Any]]
    warm_up = COMPILED
    load_seconds = 0.5
    details = ("gpu: a detail",)
    notices = ("the context is 100 tokens",)

    def __init__(self, path: Path, **options: Any) -> None:
        self.made.append(options)
        choice = defaults.choose_devices(
            options["devices"], options["split_mode"], options["tensor_split"], backend=options["backend"]
        )
        self.chosen_devices = choice.notice
        self._crew = make_crew(choice.devices, choice.split_mode, choice.tensor_split)
        if options["compiling"] is not None:
            options["compiling"](0, 3)

    @property
    def compiles_ahead(self) -> bool:
        return any(device.is_gpu for device in self._crew.devices)

    def device_memory(self) -> dict[str, dict[str, int]]:
        return {self._crew.label(i): {"weights": 1} for i in range(len(self._crew))}

    def finish_compiling(self) -> None:
        self.made[-1]["is_finished"] = True

    def allow_idle_tasks(self) -> None: ...

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of the models that commands have loaded, on a machine with a GPU."""
    pytest.importorskip("triton")
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(FakeLLM, "made", found, raising=False)
    for module in (warm, llm_module):
        monkeypatch.setattr(module, "LLM", FakeLLM)
    for module in (crew, defaults):
        monkeypatch.setattr(module, "known_devices", lambda: ("cpu", "cuda:0"))
    monkeypatch.setattr(defaults, "_free_bytes", lambda _: 2**33)
    return found


def test_a_command_without_flags_uses_the_gpu(
    made: list[dict[str, Any]], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = load(Path(model), LoadOptions())
    said = capsys.readouterr().err
    assert list(llm.device_memory()) == ["cuda:0"]
    assert "devices: cuda:0 (8.0 GiB free) (--device chooses others)" in said
    assert "note: the context is 100 tokens" in said
    assert "compiling 3 kernels, first time on this GPU" in said
    assert "kernels: 3 compiled in 1.5 s (4 s of one core); 3 others are being compiled" in said
    assert "note: not compiled: _gate: no memory" in said
    assert "× _matmul" not in said
    assert made[0]["n_parallel"] == 1


def test_verbose_says_which_kernels_were_compiled_and_how_long_it_took(
    made: list[dict[str, Any]], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load(Path(model), LoadOptions(verbose=True))
    said = capsys.readouterr().err
    assert "  2 × _matmul, 3.25 s\n  1 × _norm, 0.50 s\n" in said
    assert "gpu: a detail" in said


@pytest.mark.parametrize(("flags", "is_listed"), [([], False), (["--verbose"], True)])
def test_kernels_that_were_compiled_beside_the_answer_are_listed_after_it(
    motley: Motley, llm: OtherFakeLLM, model: str, flags: list[str], is_listed: bool
) -> None:
    def compile_others(piece: int) -> None:
        llm.warm_up = ALL_COMPILED

    llm.before_piece = compile_others
    said = motley("run", model, "-p", "Once", *flags).stderr
    assert ("kernels: 2 compiled in 4.0 s (3 s of one core)\n  1 × _choose, 2.50 s" in said) == is_listed
    assert "4 tokens, 12.0 tokens/s" in said
    llm.before_piece = lambda piece: None
    assert "kernels:" not in motley("run", model, "-p", "Once", *flags).stderr  # nothing new


def test_kernels_that_fail_beside_the_answer_are_named_without_verbose(
    motley: Motley, llm: OtherFakeLLM, model: str
) -> None:
    def fail(piece: int) -> None:
        llm.warm_up = COMPILED

    llm.before_piece = fail
    said = motley("run", model, "-p", "Once").stderr
    assert "note: not compiled: _gate: no memory" in said
    assert "× _matmul" not in said


def test_bench_says_what_was_compiled(motley: Motley, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module.LLM, "warm_up", COMPILED)
    flags = ["-p", "4", "-n", "2", "-r", "1", "--device", "cpu"]
    said = motley("bench", *flags, "--verbose").stderr
    assert (
        "kernels: 3 compiled in 1.5 s (4 s of one core); 3 others are being compiled\n  2 × _matmul" in said
    )
    monkeypatch.setattr(llm_module.LLM, "warm_up", ALL_COMPILED)
    assert "kernels" not in motley("bench", *flags).stderr


def test_warm_compiles_for_one_request_and_for_the_usual_number(
    motley: Motley, made: list[dict[str, Any]], model: str
) -> None:
    result = motley("warm", model, "--verbose")
    assert result.exit_code == 0, result.output
    assert [(each["n_parallel"], each["is_finished"]) for each in made] == [(None, True), (1, True)]
    assert result.stderr.count("devices: cuda:0") == 1
    assert "2 × _matmul" in result.stderr
    made.clear()
    assert "× _matmul" not in motley("warm", model, "-np", "1", "-ctk", "q8_0").stderr
    assert [(each["n_parallel"], each["cache_type_k"]) for each in made] == [(1, "q8_0")]


def test_where_nothing_is_compiled_ahead_warm_says_so(
    motley: Motley, made: list[dict[str, Any]], model: str
) -> None:
    result = motley("warm", model, "--device", "cpu")
    assert result.exit_code == 0
    assert "nothing is compiled ahead" in result.stderr
    assert "note: not compiled: _gate: no memory" in result.stderr
    assert "all compiled before" not in result.stderr
    assert len(made) == 1


def test_warm_compiles_for_a_gpu_beside_a_cpu(motley: Motley, made: list[dict[str, Any]], model: str) -> None:
    result = motley("warm", model, "--device", "cuda:0,cpu")
    assert result.exit_code == 0, result.output
    assert [each["is_finished"] for each in made] == [True, True]
    assert "nothing is compiled ahead" not in result.stderr


def test_the_progress_bar_says_that_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    with loading_bar("Loading a.gguf") as (progress, compiling):
        progress(1 << 20, 2 << 20)
        compiling(5, 80)
    shown = screen.getvalue()
    assert "Loading a.gguf: compiling kernels, first time on this GPU (5 of 80)" in shown
