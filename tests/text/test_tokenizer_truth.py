"""Against stored truth: the pairs of text and ids, the corpora, the tokens of a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_vocabularies import PAIRS, tokenizer_of

from motley.gguf import read_spec
from motley.text import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_encodes_as_stored(shared: Path, name: str) -> None:
    folder = shared / "data" / "vocab"
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_text("utf-8").split(SEPARATOR)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text("utf-8").split("\n")
    expected = [[int(i) for i in line.split()] for line in lines]
    tokenizer = tokenizer_of(folder, name)
    assert len(texts) > 40
    assert [tokenizer.encode(text, add_special=False) for text in texts] == expected


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("book", ["moby-dick.txt", "wagahaiwa_nekodearu-ja.txt", "wiki.valid.raw"])
def test_books_survive_the_round_trip(shared: Path, name: str, book: str) -> None:
    text = (shared / "data" / "corpora" / book).read_text("utf-8")[:40_000]
    tokenizer = tokenizer_of(shared / "data" / "vocab", name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < 4 * len(text)


def test_the_story_of_a_real_model_reads_as_english_and_encodes_to_the_same_ids(shared: Path) -> None:
    folder = shared / "data" / "models" / "stories260K"
    tokenizer = Tokenizer.from_spec(read_spec(folder / "stories260K.gguf"))
    ids = json.loads((folder / "golden_greedy.json").read_text())["greedy"]
    story = tokenizer.decode(ids)
    assert story.startswith("Once upon a time, there was a little girl named")
    assert tokenizer.encode(story) == ids


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("phi-3", {"<|end|>", "<|endoftext|>"}),
        ("llama-bpe", {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
        ("qwen2", {"<|im_end|>", "<|endoftext|>"}),
        ("falcon", {"<|endoftext|>"}),
    ],
)
def test_all_ends_of_a_turn_are_known(shared: Path, name: str, ends: set[str]) -> None:
    tokenizer = tokenizer_of(shared / "data" / "vocab", name)
    assert {tokenizer.token_text(i) for i in tokenizer.eog_ids} == ends


def test_phi3_special_tokens_swallow_the_white_space_after_them(shared: Path) -> None:
    tokenizer = tokenizer_of(shared / "data" / "vocab", "phi-3")
    spaced = tokenizer.encode("<|user|>\nHello<|end|>\n<|assistant|>\n")
    assert spaced == tokenizer.encode("<|user|>Hello<|end|><|assistant|>")
