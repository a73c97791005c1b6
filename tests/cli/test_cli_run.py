"""`motley run` with one prompt."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_llm import CHAT_SPEC, TIMINGS, FakeLLM
from typer.testing import Result

from motley.bundled import bundled_model_path
from motley.engine import SamplingParams
from motley.errors import RequestError

Motley = Callable[..., Result]


def test_the_answer_is_on_stdout_and_the_figures_on_stderr(motley: Motley, llm: FakeLLM, model: str) -> None:
    result = motley("run", model, "-p", "Once")
    assert result.exit_code == 0
    assert result.stdout == "Hello, wörld\n"
    assert result.stderr == "4 tokens, 12.0 tokens/s\n"
    result = motley("run", model, "-p", "Once", "--verbose")
    assert "prompt: 5 tokens (1 cached), 8.0 tokens/s | answer: 4 tokens, 12.0 tokens/s" in result.stderr
    assert "memory: 4.0 MiB (weights 3.0 MiB, kv cache 1.0 MiB, activations 512 B)" in result.stderr
    assert llm.prompts == ["Once", "Once"]
    assert llm.is_closed


def test_without_a_model_the_bundled_one_runs(motley: Motley, llm: FakeLLM) -> None:
    assert motley("run", "-p", "Once").exit_code == 0
    assert llm.path == bundled_model_path()


def test_every_llama_cpp_flag_reaches_its_place(motley: Motley, llm: FakeLLM, model: str) -> None:
    flags = (
        "-n 12 -c 256 --temp 0.5 --top-k 7 --top-p 0.6 --min-p 0.1 --typical 0.9 --repeat-penalty 1.2 "
        "--repeat-last-n 32 --presence-penalty 0.3 --frequency-penalty 0.4 -s 42 -ctk q8_0 -ctv q4_0 -t 3 "
        "--backend reference --ignore-eos -r END -r STOP"
    )
    result = motley("run", "-m", model, "-p", "Once", *flags.split())
    assert result.exit_code == 0, result.stderr
    assert (llm.options.ctx_size, llm.options.threads, llm.options.backend) == (256, 3, "reference")
    assert (llm.options.cache_type_k, llm.options.cache_type_v) == ("q8_0", "q4_0")
    assert llm.params == SamplingParams(
        max_tokens=12,
        temperature=0.5,
        top_k=7,
        top_p=0.6,
        min_p=0.1,
        typical_p=0.9,
        repeat_penalty=1.2,
        repeat_last_n=32,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        seed=42,
        stop=("END", "STOP"),
        ignore_eos=True,
    )


@pytest.mark.parametrize("flags", [("-ctk=q8_0", "-c", "128"), ("-c128", "-ctk", "q8_0")])
def test_flags_that_begin_alike_are_told_apart(
    motley: Motley, llm: FakeLLM, model: str, flags: tuple[str, ...]
) -> None:
    assert motley("run", model, "-p", "Once", *flags).exit_code == 0
    assert (llm.options.ctx_size, llm.options.cache_type_k) == (128, "q8_0")


def test_minus_one_means_no_limit_and_no_seed(motley: Motley, llm: FakeLLM, model: str) -> None:
    assert motley("run", model, "-p", "Once", "-n", "-1", "-s", "-1").exit_code == 0
    assert (llm.params.max_tokens, llm.params.seed) == (None, None)


def test_json_is_one_object_and_nothing_else(motley: Motley, llm: FakeLLM, model: str) -> None:
    result = motley("run", model, "-p", "Once", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "model": "model.gguf",
        "text": "Hello, wörld",
        "tokens": [7, 8, 9],
        "finish_reason": "stop",
        "timings": asdict(TIMINGS),
        "load_seconds": 1.5,
        "memory": {"weights": 3 << 20, "kv_cache": 1 << 20, "activations": 512},
    }


def test_a_chat_template_is_used_where_there_is_one(motley: Motley, llm: FakeLLM, model: str) -> None:
    llm.spec = CHAT_SPEC
    motley("run", model, "-p", "Hi", "-sys", "Be brief.")
    motley("run", model, "-p", "Hi", "-no-cnv")
    assert llm.prompts == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "Hi",
    ]


def test_the_prompt_is_shown_before_its_continuation_on_request(
    motley: Motley, llm: FakeLLM, model: str
) -> None:
    result = motley("run", model, "-p", "Well... ", "--display-prompt")
    assert result.stdout == "Well... Hello, wörld\n"


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_the_prompt_can_come_from_a_file(
    motley: Motley, llm: FakeLLM, model: str, tmp_path: Path, source: str
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("Grüße", encoding="utf-8")
    result = motley("run", model, "-f", str(text) if source == "file" else "-", stdin="Grüße")
    assert result.exit_code == 0
    assert llm.prompts == ["Grüße"]


def test_ctrl_c_ends_the_answer_between_two_tokens(motley: Motley, llm: FakeLLM, model: str) -> None:
    before = signal.getsignal(signal.SIGINT)  # whoever started the tests may have it ignored
    llm.before_piece = lambda index: signal.raise_signal(signal.SIGINT) if index == 1 else None
    result = motley("run", model, "-p", "Once")
    assert result.exit_code == 130
    assert result.stdout == "Hello, \n"
    assert "stopped" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("no/such/file.gguf", "-p", "x"), "there is no file no/such/file.gguf", "a prompt goes after -p"),
        (("x" * 300, "-p", "x"), "there is no file xxx", "a prompt goes after -p"),
        ((".", "-p", "x"), ". is a folder", ".gguf"),
        (("MODEL", "-m", "MODEL", "-p", "x"), "two models", "give one"),
        (("MODEL", "-p", "x", "-f", "y"), "two texts", "give one"),
        (("MODEL", "-f", "no/such.txt"), "cannot read no/such.txt: No such file", "-f takes a text file"),
        (("MODEL", "-p", "x", "--top-p", "1.5"), "--top-p 1.5", "from 0 to 1"),
        (("MODEL", "-p", "x", "-n", "0"), "-n 0", ">= 1, or -1: no limit"),
        (("MODEL", "-p", "x", "-s", "-2"), "--seed -2", ", or -1: a different one each time"),
        (("MODEL", "-p", "x", "-sys", "y"), "a system prompt needs a chat", "-cnv"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint(
    motley: Motley, llm: FakeLLM, model: str, args: tuple[str, ...], message: str, hint: str
) -> None:
    result = motley("run", *(model if arg == "MODEL" else arg for arg in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    error_line, hint_line = result.stderr.splitlines()
    assert error_line.startswith("error: ")
    assert message in error_line
    assert hint_line.startswith("hint: ")
    assert hint in hint_line


def test_memory_that_is_not_there_is_no_trace(motley: Motley, llm: FakeLLM, model: str) -> None:
    llm.error = MemoryError()
    result = motley("run", model, "-p", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: this machine has too little memory")


def test_a_text_that_is_not_utf8_says_where(motley: Motley, llm: FakeLLM, model: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff")
    result = motley("run", model, "-f", str(bad))
    assert result.exit_code == 2
    assert "not UTF-8: invalid start byte at byte 3" in result.stderr


def test_an_error_of_the_model_is_reported_and_debug_shows_its_trace(
    motley: Motley, llm: FakeLLM, model: str
) -> None:
    llm.error = RequestError("the prompt is too long", hint="raise -c")
    result = motley("run", model, "-p", "x")
    assert (result.exit_code, result.stderr) == (2, "error: the prompt is too long\nhint: raise -c\n")
    llm.error = RequestError("the prompt is too long", hint="raise -c")
    result = motley("run", model, "-p", "x", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: the prompt is too long\nhint: raise -c\n")


@pytest.mark.parametrize("args", [("run", "--no-such-flag"), ("run", "-n", "many"), ("walk",)])
def test_usage_errors_exit_with_2_as_well(motley: Motley, args: tuple[str, ...]) -> None:
    assert motley(*args).exit_code == 2


def test_the_version_is_the_package_s(motley: Motley) -> None:
    import motley as package

    assert motley("--version").stdout == f"motley {package.__version__}\n"


@pytest.mark.parametrize("command", ["run", "perplexity", "tokenize", "inspect"])
def test_every_command_has_help_with_an_example(motley: Motley, command: str) -> None:
    result = motley(command, "--help")
    assert result.exit_code == 0
    assert f"motley {command} model.gguf" in result.stdout
