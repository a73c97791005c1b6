from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_vocabularies import BYTE, CONTROL, NORMAL, PREFIX, byte_level_metadata

from motley.errors import TokenizerError
from motley.text import Tokenizer
from motley.text.pretokenizers import PRETOKENIZERS

TOKENIZERS: dict[str, Tokenizer] = {}
MERGES = ("t h", "th e", "Ġ the", "i n", "in g", "Ã ¤")


def texts_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special=False)]


@pytest.mark.parametrize("pre", sorted(set(PRETOKENIZERS) - {"gemma4"}))
@settings(max_examples=20)  # of every one
@given(text=st.text(max_size=40))
def test_any_text_survives_every_pretokenizer(pre: str, text: str) -> None:
    tokenizer = TOKENIZERS.setdefault(pre, Tokenizer.from_metadata(byte_level_metadata(MERGES, pre=pre)))
    expected = unicodedata.normalize("NFC", text) if PRETOKENIZERS[pre].normalizes else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234  ok", ["it", "'s", " 1234", " ", " ok"]),
        ("starcoder", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 1234!\n\nok", ["IT", "'S", " ", "123", "4", "!\n\n", "ok"]),
        ("qwen2", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-llm", "Hi, 我想 12", ["Hi", ",", " ", "我想", " ", "1", "2"]),
        ("deepseek-v3", "Hi 我想 1234", ["Hi", " ", "我想", " ", "123", "4"]),
        ("falcon", "x=1234", ["x", "=", "123", "4"]),
        ("default", "x=1234", ["x", "=", "123", "4"]),
    ],
)
def test_words_are_cut_as_the_family_cuts_them(pre: str, text: str, words: list[str]) -> None:
    """With merges that build each word from its beginning, a word becomes one token, and no more than a word."""
    merges: dict[str, None] = {}
    for word in words:
        spelled = byte_level(word)
        merges |= {f"{spelled[:n]} {spelled[n]}": None for n in range(1, len(spelled))}
    # And merges that join whole words, which a cut between them must prevent.
    merges |= {f"{byte_level(a)} {byte_level(b)}": None for a, b in pairwise(words)}
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(list(merges), pre=pre))
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, add_special=False)] == words


def byte_level(text: str) -> str:
    tokenizer = TOKENIZERS.setdefault("bytes", Tokenizer.from_metadata(byte_level_metadata()))
    return "".join(tokenizer.token_text(i) for i in tokenizer.encode(text))


def test_merges_follow_their_order() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(MERGES))
    assert texts_of(tokenizer, "the the thing ä") == ["the", "Ġthe", "Ġ", "th", "ing", "Ġ", "Ã¤"]


def test_a_vocabulary_that_ignores_merges_takes_whole_words() -> None:
    merges = ("a b", "b c")  # "abc" is a token that no merge makes
    whole = [("abc", NORMAL)]
    metadata = byte_level_metadata(merges, special=whole)
    assert texts_of(Tokenizer.from_metadata(metadata), "abc") == ["ab", "c"]
    assert texts_of(Tokenizer.from_metadata(metadata | {PREFIX + "pre": "llama-bpe"}), "abc") == ["abc"]


def test_an_unknown_pretokenizer_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is 'no-such'.*llama-bpe.*qwen2"):
        Tokenizer.from_metadata(byte_level_metadata(pre="no-such"))


def test_gemma4_writes_spaces_as_u2581_and_unknown_characters_as_bytes() -> None:
    tokens = [(c, NORMAL) for c in "▁heo\nl"] + [("▁h", NORMAL), ("\n\n", NORMAL), ("<bos>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    metadata = {
        PREFIX + "model": "gemma4",
        PREFIX + "tokens": [text for text, _ in tokens],
        PREFIX + "token_type": [kind for _, kind in tokens],
        PREFIX + "merges": ["▁ h", "\n \n"],
        PREFIX + "bos_token_id": 8,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("ho ho\n\né")
    assert [tokenizer.token_text(i) for i in ids] == [
        "<bos>",
        "h",
        "o",
        "▁h",
        "o",
        "\n\n",
        "<0xC3>",
        "<0xA9>",
    ]
    assert tokenizer.decode(ids) == "ho ho\n\né"


def test_qwen2_sees_composed_characters_only() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
