from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocabularies import CONTROL, byte_level_metadata, sentencepiece_metadata

from motley.text import Tokenizer

TOKENIZERS = {
    "sentencepiece": Tokenizer.from_metadata(sentencepiece_metadata({"▁": 0, "▁a": -1, "日": 0, "a": 0})),
    "byte-level": Tokenizer.from_metadata(byte_level_metadata(("Ġ a", "æ Ĺ"), special=[("<s>", CONTROL)])),
}
kinds = pytest.mark.parametrize("kind", sorted(TOKENIZERS))


@kinds
@given(data=st.data(), skip_special=st.booleans())
def test_a_stream_says_what_decoding_says(kind: str, data: st.DataObject, skip_special: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=40))
    stream = tokenizer.stream(skip_special=skip_special)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip_special=skip_special)
    whole = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip_special and is_hidden(tokenizer, i)))
    if kind == "sentencepiece":
        whole = whole.removeprefix(b" ")
    assert tokenizer.decode(ids, skip_special=skip_special) == whole.decode("utf-8", "replace")


def is_hidden(tokenizer: Tokenizer, token: int) -> bool:
    return tokenizer.token_text(token) in ("<unk>", "<s>", "</s>")


@kinds
@given(text=st.text(max_size=40).filter(lambda text: "▁" not in text and "\ufffd" not in text))
def test_characters_come_out_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = tokenizer.stream()
    shown = ""
    for token in tokenizer.encode(text, parse_special=False):
        shown += stream.push(token)
        assert text.startswith(shown)
    assert shown + stream.flush() == text


@kinds
def test_bytes_that_cannot_become_a_character_are_shown_as_soon_as_that_is_certain(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    first, second, *_ = [
        i for i in tokenizer.encode("語", add_special=False) if tokenizer.token_bytes(i) != b" "
    ]
    letter = tokenizer.token_id("a")
    assert letter is not None
    stream = tokenizer.stream()
    assert [stream.push(first), stream.push(second)] == ["", ""]
    assert stream.push(letter) == "\ufffda"
    assert stream.push(first) == ""
    assert stream.flush() == "\ufffd"


def test_the_prefix_space_goes_once_and_only_at_the_beginning() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    word = tokenizer.token_id("▁a")
    assert word is not None
    assert tokenizer.decode([1, word, word]) == "a a"
    assert tokenizer.decode([word], after=[1, word]) == " a"
    assert tokenizer.decode([word], after=[1]) == "a"
