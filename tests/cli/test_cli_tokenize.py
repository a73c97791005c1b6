"""`motley tokenize` with the vocabulary of a real model, which needs no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Motley = Callable[..., Result]


@pytest.fixture(scope="module")
def vocab(shared: Path) -> str:
    return str(shared / "data" / "vocab" / "ggml-vocab-llama-spm.gguf")


def test_each_token_has_a_line_and_the_count_is_beside(motley: Motley, vocab: str) -> None:
    result = motley("tokenize", vocab, "-p", "Hello world\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "     1 -> '<s>'",
        " 15043 -> ' Hello'",
        "  3186 -> ' world'",
        "    13 -> '\\n'",
    ]
    assert result.stderr == "4 tokens\n"


def test_json_has_ids_pieces_and_count(motley: Motley, vocab: str) -> None:
    result = motley("tokenize", vocab, "-p", "Hello 🦙", "--no-bos", "--json")
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "count": 6,
        "ids": [15043, 29871, 243, 162, 169, 156],
        "pieces": [" Hello", " ", r"\xf0", r"\x9f", r"\xa6", r"\x99"],  # no such token: byte by byte
    }


def test_ids_from_standard_input(motley: Motley, vocab: str) -> None:
    assert motley("tokenize", vocab, "--ids", stdin="Hello world").stdout == "[1, 15043, 3186]\n"


def test_special_tokens_are_parsed_unless_told_not_to(motley: Motley, vocab: str) -> None:
    parsed = json.loads(motley("tokenize", vocab, "-p", "a</s>", "--no-bos", "--json").stdout)
    plain = json.loads(
        motley("tokenize", vocab, "-p", "a</s>", "--no-bos", "--no-parse-special", "--json").stdout
    )
    assert parsed["ids"][-1] == 2
    assert 2 not in plain["ids"]
