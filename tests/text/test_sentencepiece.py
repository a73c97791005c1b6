from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from text_vocabularies import BYTE, NORMAL, PREFIX, USER_DEFINED, sentencepiece_metadata

from motley.text import Tokenizer
from motley.text.sentencepiece import MAX_CACHED_LENGTH, SentencePieceEncoder

SPACE = "▁"
pieces = st.dictionaries(
    st.text(alphabet="ab" + SPACE, min_size=1, max_size=5),
    st.integers(-3, 0).map(float),  # few scores, so that ties are common
    max_size=25,
)


def merged_the_slow_way(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: again and again, join the leftmost of the best pairs of the whole text."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(pieces, st.text(alphabet="ab c", max_size=30))
def test_merges_like_the_definition(scores: dict[str, float], text: str) -> None:
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(scores, add_space_prefix=False))
    expected: list[str] = []
    for part in merged_the_slow_way(text.replace(" ", SPACE), scores):
        expected += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
    ids = tokenizer.encode(text, add_special=False)
    assert [tokenizer.token_text(i) for i in ids] == expected


@given(pieces, st.text(max_size=30), st.booleans())
def test_any_text_survives_the_round_trip(scores: dict[str, float], text: str, prefix: bool) -> None:
    text = text.replace(SPACE, "")  # which these vocabularies cannot tell from a space
    metadata = sentencepiece_metadata({SPACE: -9.0} | scores, add_space_prefix=prefix)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_position_decides_between_equal_scores() -> None:
    metadata = sentencepiece_metadata({"a": 0, "b": 0, "ba": -1, "ab": -1}, add_space_prefix=False)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("aba", add_special=False)] == ["ab", "a"]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("bab", add_special=False)] == ["ba", "b"]


def test_the_space_prefix_is_put_before_text_and_after_special_tokens() -> None:
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata({SPACE: 0, "x": 0, SPACE + "x": -1}))
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("x</s>x")]
    assert texts == ["<s>", "▁x", "</s>", "▁x"]
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode(tokenizer.encode(" x")) == " x"


def test_extra_white_space_is_removed_where_the_file_says_so() -> None:
    pieces = {SPACE: 0.0, "x": 0.0, "y": 0.0}
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(pieces, remove_extra_whitespaces=True))
    assert tokenizer.encode("  x   y ") == tokenizer.encode("x y")
    assert tokenizer.encode("   ", add_special=False) == []


def test_without_byte_tokens_a_run_of_unknown_characters_is_one_unknown_token() -> None:
    metadata = sentencepiece_metadata({SPACE: 0, "x": 0}, add_space_prefix=False)
    types = [NORMAL if kind == BYTE else kind for kind in metadata[PREFIX + "token_type"]]
    tokenizer = Tokenizer.from_metadata(metadata | {PREFIX + "token_type": types})
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("x日本x語", add_special=False)]
    assert texts == ["x", "<unk>", "x", "<unk>"]


def test_plain_text_never_becomes_a_control_token() -> None:
    pieces = {"<": 0, "s": 0, ">": 0, "<s": -1}
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(pieces, add_space_prefix=False))
    ids = tokenizer.encode("<s>", add_special=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["<s", ">"]


def test_user_defined_tokens_are_found_before_any_merge() -> None:
    metadata = sentencepiece_metadata(
        {"a": 0, "b": 0, "ab": 9}, special=[("ba", USER_DEFINED)], add_space_prefix=False
    )
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("abab", add_special=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["a", "ba", "b"]


def test_long_segments_are_not_kept() -> None:
    """A text without a cut is one segment of any length: kept, it would cost memory for ever."""
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata({SPACE: -4.0, "a": -3.0, "aa": -1.0}))
    encoder = tokenizer._encoder
    assert isinstance(encoder, SentencePieceEncoder)
    kept = []
    for n in (10, MAX_CACHED_LENGTH + 1, 5000):
        assert tokenizer.decode(tokenizer.encode("a" * n)) == "a" * n
        kept.append(encoder._cached_ids.cache_info().currsize)
    assert kept[0] == kept[1] == kept[2] > 0
