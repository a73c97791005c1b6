"""The bundled model is what its card says, and its recall drill is honest."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf
from motley.bundled import (
    bundled_draft_path,
    bundled_experts_path,
    bundled_model_path,
    is_recalled,
    make_recall_prompts,
)
from motley.bundled.recall import CODAS, ONSETS, VOWELS, RecallPrompt, is_held_out, pseudo_word, secret
from motley.errors import ConfigError

MAX_BYTES, MAX_DRAFT_BYTES, MAX_EXPERTS_BYTES = 16_000_000, 6_000_000, 12_000_000
SECRET = re.compile(r"The secret of (\w+) is (\w+)\.")


def encode(text: str) -> list[int]:
    """A stand-in for a tokenizer: words, and what stands between them, as character codes."""
    return [ord(piece[0]) for piece in re.findall(r"\w{1,4}|[^\w\s]|\n", text)]


@pytest.fixture(scope="module")
def text() -> str:
    rng = random.Random(7)
    sentence = lambda: " ".join(pseudo_word(rng, held_out=False) for _ in range(rng.randint(3, 15)))  # noqa: E731
    return " ".join(
        sentence().capitalize() + rng.choice(".!?") + rng.choice(["", "\n\n"]) for _ in range(3000)
    )


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(bundled_model_path())


def test_files_are_small_enough_for_the_wheel() -> None:
    assert bundled_model_path().stat().st_size <= MAX_BYTES
    assert bundled_draft_path().stat().st_size <= MAX_DRAFT_BYTES
    assert bundled_experts_path().stat().st_size <= MAX_EXPERTS_BYTES


@pytest.mark.parametrize("path", [bundled_model_path(), bundled_draft_path(), bundled_experts_path()])
def test_the_card_names_each_file_by_its_checksum(path: Path) -> None:
    card = (path.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert path.name in card
    assert hashlib.sha256(path.read_bytes()).hexdigest() in card


def test_siblings_share_the_vocabulary_and_the_chat_template(reader: gguf.GGUFReader) -> None:
    for path in (bundled_draft_path(), bundled_experts_path()):
        sibling = gguf.GGUFReader(path)
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template"):
            assert sibling.fields[key].contents() == reader.fields[key].contents()


def test_the_sibling_of_experts_uses_four_of_sixteen() -> None:
    fields = gguf.GGUFReader(bundled_experts_path()).fields
    assert fields["general.architecture"].contents() == "qwen3moe"
    assert fields["qwen3moe.expert_count"].contents() == 16
    assert fields["qwen3moe.expert_used_count"].contents() == 4


def test_architecture_is_a_llama_with_grouped_queries(reader: gguf.GGUFReader) -> None:
    def field(key: str) -> object:
        return reader.fields[key].contents()

    assert field("general.architecture") == "llama"
    assert field("llama.attention.key_length") == field("llama.attention.value_length") == 64
    assert field("llama.attention.head_count") == 8
    assert field("llama.attention.head_count_kv") == 4
    assert field("llama.block_count") == 8
    assert field("llama.context_length") == 4096
    assert field("tokenizer.ggml.add_bos_token") is True


def test_matrices_are_packed_and_their_rows_fill_whole_blocks(reader: gguf.GGUFReader) -> None:
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) == 2]
    assert len(matrices) == 1 + 7 * 8
    assert {tensor.tensor_type for tensor in matrices} == {gguf.GGMLQuantizationType.Q8_0}
    assert all(tensor.shape[0] % 32 == 0 for tensor in matrices)


@given(st.integers(), st.booleans())
def test_training_and_test_words_are_disjoint(seed: int, held_out: bool) -> None:
    word = pseudo_word(random.Random(seed), held_out=held_out)
    assert is_held_out(word) is is_held_out(word.capitalize()) is held_out


def test_no_held_out_word_stands_in_the_books_of_the_training(shared: Path) -> None:
    """Words are invented, but chance invents "river"."""
    one_of = lambda pieces: "(?:" + "|".join(pieces) + ")"  # noqa: E731
    invented = re.compile(f"(?:{one_of(ONSETS)}{one_of(VOWELS)}){{2,3}}{one_of(CODAS)}")
    books = "tinyshakespeare war-and-peace moby-dick pride-and-prejudice frankenstein botchan"
    texts = [
        (shared / "data" / "corpora" / f"{book}.txt").read_text(encoding="utf-8") for book in books.split()
    ]
    words = set(re.findall(r"[a-z]+", " ".join(texts).lower()))
    assert len(words) > 20_000
    assert [word for word in words if invented.fullmatch(word) and is_held_out(word)] == []


def test_about_one_word_in_eight_is_held_out() -> None:
    rng = random.Random(0)
    words = [f"{rng.random()}" for _ in range(4000)]
    assert 0.1 < sum(map(is_held_out, words)) / len(words) < 0.15


@pytest.mark.parametrize("length", [300, 1000])
def test_prompts_are_as_long_as_asked_to_within_a_word(text: str, length: int) -> None:
    for prompt in make_recall_prompts(encode, text, n=5, length=length, seed=3):
        assert length - 4 <= len(prompt.tokens) <= length
        assert list(prompt.tokens) == encode(prompt.text)


def test_every_secret_of_a_prompt_uses_words_outside_training(text: str) -> None:
    for prompt in make_recall_prompts(encode, text, n=5, length=500, seed=4, n_secrets=6):
        secrets = SECRET.findall(prompt.text)
        assert len(secrets) == len(dict(secrets)) == 6
        assert all(is_held_out(word) for pair in secrets for word in pair)


def test_the_question_is_about_the_needle_and_stands_at_the_end(text: str) -> None:
    for prompt in make_recall_prompts(encode, text, n=5, length=500, seed=5):
        key = re.findall(r"The secret of (\w+) is$", prompt.text)[0]
        assert dict(SECRET.findall(prompt.text))[key] == prompt.answer
        assert prompt.text.count(secret(key, prompt.answer)) == 1


def test_needles_are_spread_from_start_to_end(text: str) -> None:
    distances = [prompt.distance for prompt in make_recall_prompts(encode, text, n=10, length=1000, seed=6)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 850
    assert distances[-1] < 150


def test_a_seed_decides_the_prompts(text: str) -> None:
    first, again, other = (
        make_recall_prompts(encode, text, n=2, length=300, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_without_the_secrets_a_prompt_is_the_text(text: str) -> None:
    [prompt] = make_recall_prompts(encode, text, n=1, length=400, seed=8)
    passage, _, _ = SECRET.sub("", prompt.text).rpartition("The secret of")
    assert re.sub(r"\s+", "", passage) in re.sub(r"\s+", "", text)


@pytest.mark.parametrize("length", [20, 1_000_000])
def test_a_length_that_cannot_be_met_is_refused(text: str, length: int) -> None:
    with pytest.raises(ConfigError, match=f"no recall prompt of {length} tokens"):
        make_recall_prompts(encode, text, n=1, length=length, seed=0)


def test_a_text_without_sentences_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sentences"):
        make_recall_prompts(encode, "no end in sight", n=1, length=10, seed=0)


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [(" zalk. Then", True), ("zalk", True), (" zalkova", False), (" the zalk", False), ("", False)],
)
def test_only_the_whole_answer_counts(completion: str, is_right: bool) -> None:
    prompt = RecallPrompt(text="The secret of Drusk is", tokens=(1,), answer="zalk", distance=9)
    assert is_recalled(prompt, completion) is is_right
