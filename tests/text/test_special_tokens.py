from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level_metadata

from motley.errors import TokenizerError
from motley.text import Tokenizer

SPECIAL = [
    ("<|a|>", CONTROL),
    ("<|a|>b", CONTROL),
    ("<u>", USER_DEFINED),
    ("é", USER_DEFINED),
    ("<s>", CONTROL),
]


def make(**fields: object) -> Tokenizer:
    return Tokenizer.from_metadata(byte_level_metadata(special=SPECIAL, **fields))


def texts_of(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


def test_the_longest_special_token_wins() -> None:
    assert texts_of(make(), "x<|a|>bc<|a|>é") == ["x", "<|a|>b", "c", "<|a|>", "é"]


def test_control_tokens_in_text_are_only_text_unless_asked_for() -> None:
    tokenizer = make()
    assert texts_of(tokenizer, "<|a|><u>", parse_special=False) == [*"<|a|>", "<u>"]
    assert texts_of(tokenizer, "<|a|><u>") == ["<|a|>", "<u>"]


@given(
    st.lists(st.sampled_from(["<|a|>", "<|a|>b", "<u>", "é", "x", "<|", "b", " "]), max_size=12).map("".join)
)
def test_special_tokens_survive_the_round_trip(text: str) -> None:
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_decoding_leaves_control_tokens_out_and_keeps_user_defined_ones() -> None:
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode("<|a|>x<u>")) == "x<u>"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["x"]),
        ({"add_bos_token": True}, ["<s>", "x"]),
        ({"add_eos_token": True}, ["x", "<u>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "x", "<u>"]),
        ({"pre": "llama-bpe"}, ["<s>", "x"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["x"]),
    ],
)
def test_a_text_gets_the_tokens_that_the_file_asks_for(
    fields: dict[str, object], expected: list[str]
) -> None:
    bos, eos = 256 + 4, 256 + 2
    tokenizer = make(bos_token_id=bos, eos_token_id=eos, **fields)
    assert texts_of(tokenizer, "x") == expected
    assert texts_of(tokenizer, "x", add_special=False) == ["x"]


def test_a_text_that_begins_with_bos_gets_no_second_one() -> None:
    tokenizer = make(bos_token_id=256 + 4, add_bos_token=True)
    assert texts_of(tokenizer, "<s>x") == ["<s>", "x"]


def test_the_end_of_a_message_is_no_end_of_the_turn_where_a_turn_has_several() -> None:
    ends = [("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL)]
    several = Tokenizer.from_metadata(byte_level_metadata(special=ends, eot_token_id=256))
    assert {several.token_text(i) for i in several.eog_ids} == {"<|return|>", "<|call|>"}
    single = Tokenizer.from_metadata(byte_level_metadata(special=ends[:1]))
    assert {single.token_text(i) for i in single.eog_ids} == {"<|end|>"}


def test_ordinary_and_user_defined_tokens_that_look_like_an_end_of_text_are_none() -> None:
    for kind in (NORMAL, USER_DEFINED):
        tokenizer = Tokenizer.from_metadata(byte_level_metadata(special=[("</s>", kind)]))
        assert not tokenizer.eog_ids


def test_text_that_is_not_unicode_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        make().encode("\ud800")
