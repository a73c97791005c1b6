"""`motley run`: --chat-template, --logit-bias, --prompt-cache, and texts without an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_llm import FakeLLM
from typer.testing import Result

from motley.cli.templates import resolve_template
from motley.text.template import KEY

Motley = Callable[..., Result]
HI = [{"role": "user", "content": "Hi"}]


def test_a_chat_template_has_a_name_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    metadata = {KEY: "own", f"{KEY}.short": "short {{ messages[0].content }}"}
    assert resolve_template(metadata, str(file)).render(HI) == "[Hi]"
    assert resolve_template(metadata, "short").render(HI) == "short Hi"
    assert resolve_template(metadata, "chatml").render(HI).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    assert "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>" in resolve_template(
        metadata, "llama3"
    ).render(HI)
    assert "<start_of_turn>user\nHi<end_of_turn>" in resolve_template(metadata, "gemma").render(HI)
    assert resolve_template(metadata, "phi3").render(HI) == "<|user|>\nHi<|end|>\n<|assistant|>\n"


def test_a_real_chat_uses_the_template_that_is_given(motley: Motley, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("Once upon a time")
    answer = motley("run", "-p", "x", "--chat-template", str(file), "-n", "4", "--temp", "0", "--json")
    plain = motley("run", "-p", "Once upon a time", "-no-cnv", "-n", "4", "--temp", "0", "--json")
    assert json.loads(answer.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--chat-template", "no-such"), "there is no chat template 'no-such'"),
        (("--chat-template", "chatml", "--chat-template-file", "x"), "two templates"),
        (("--logit-bias", "hello+1"), "--logit-bias 'hello+1' is not a token id and a bias"),
        (("--logit-bias", "5"), "--logit-bias '5' is not a token id and a bias"),
        (("--prompt-cache", "."), "--prompt-cache . is a folder"),
    ],
)
def test_what_cannot_be_is_refused(motley: Motley, args: tuple[str, ...], error: str) -> None:
    result = motley("run", "-p", "x", "-n", "1", *args)
    assert result.exit_code == 2
    assert f"error: {error}" in result.stderr


def test_a_template_s_error_cannot_control_the_terminal(motley: Motley, tmp_path: Path) -> None:
    file = tmp_path / "hostile.jinja"
    file.write_text('{{ raise_exception("\x1b]0;owned\x07\\n" + "\x1b[2J") }}')
    result = motley("run", "-p", "x", "--chat-template-file", str(file))
    assert result.exit_code == 2
    assert "\x1b" not in result.output
    assert "\\x1b]0;owned\\x07\\n\\x1b[2J" in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1


def test_a_logit_bias_reaches_the_sampler(motley: Motley, llm: FakeLLM, model: str) -> None:
    motley("run", model, "-p", "x", "-l", "5+1", "--logit-bias", "6-2.5", "-l", "7-inf")
    assert llm.params.logit_bias == {5: 1.0, 6: -2.5, 7: float("-inf")}


def test_a_prompt_cache_is_written_and_read(motley: Motley, tmp_path: Path) -> None:
    cache = tmp_path / "story.cache"
    text = "Once upon a time there was a little fox who lived in the deep dark forest with her mother. " * 2
    args = ("run", "-p", text, "-no-cnv", "-n", "2", "--temp", "0", "--json", "--prompt-cache", str(cache))
    first = motley(*args)
    assert first.exit_code == 0, first.stderr
    assert "prompt cache: wrote" in first.stderr
    size = cache.stat().st_size
    second = motley(*args, "--prompt-cache-ro")
    assert "prompt cache: read" in second.stderr
    assert "wrote" not in second.stderr
    assert json.loads(second.stdout)["timings"]["cached_tokens"] >= 32
    assert json.loads(second.stdout)["text"] == json.loads(first.stdout)["text"]
    assert cache.stat().st_size == size


def test_a_prompt_from_standard_input() -> None:
    command = [sys.executable, "-m", "motley", "run", "-f", "-", "-n", "2", "-t", "1"]
    result = subprocess.run(command, input=b"Once upon", capture_output=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_text_without_an_end_is_refused(
    motley: Motley, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr("motley.cli.inputs.MAX_TEXT", 1 << 20)
    if source == "file":
        result = motley("run", "-f", "/dev/zero")
    else:
        result = motley("run", "-f", "-", stdin="x" * (1 << 21))
    assert result.exit_code == 2
    assert "has more than 1.0 MiB" in result.stderr


def test_an_endless_file_ends_a_real_process() -> None:
    command = [sys.executable, "-m", "motley", "tokenize", "-f", "/dev/zero"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ)
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: /dev/zero has more than 256.0 MiB")
