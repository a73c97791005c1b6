"""A damaged vocabulary is a TokenizerError that names the key."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocabularies import BYTE, PREFIX, byte_level_metadata, sentencepiece_metadata

from motley.errors import TokenizerError
from motley.text import Tokenizer

SPM = sentencepiece_metadata({"a": 0.0})
BPE = byte_level_metadata(("a b",))
N = len(SPM[PREFIX + "tokens"])


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (SPM, "model", None),
        (SPM, "model", "t5"),
        (SPM, "model", 7),
        (SPM, "tokens", None),
        (SPM, "tokens", "abc"),
        (SPM, "tokens", 7),
        (SPM, "tokens", ["a", 1] * N),
        (SPM, "scores", None),
        (SPM, "scores", [0.0]),
        (SPM, "scores", ["x"] * N),
        (SPM, "scores", [math.nan] * N),
        (SPM, "token_type", [1]),
        (SPM, "token_type", [7] * N),
        (SPM, "bos_token_id", N),
        (SPM, "eos_token_id", -5),
        (SPM, "eos_token_id", True),
        (SPM, "eot_token_id", "x"),
        (SPM, "add_bos_token", 1),
        (SPM, "add_space_prefix", "yes"),
        (BPE, "pre", 7),
        (BPE, "merges", None),
        (BPE, "merges", ["ab"]),
        (BPE, "merges", ["a z"]),
        (BPE, "merges", ["a unheard-of"]),
        (BPE, "merges", [7]),
    ],
)
def test_a_bad_value_is_named(base: dict[str, object], key: str, value: object) -> None:
    damaged = {k: v for k, v in base.items() if k != PREFIX + key}
    if value is not None:
        damaged[PREFIX + key] = value
    with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.{key}"):
        Tokenizer.from_metadata(damaged)


def test_a_byte_token_must_spell_a_byte() -> None:
    types = [BYTE] * N
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.tokens\[0\] is '<unk>'.*<0xNN>"):
        Tokenizer.from_metadata(SPM | {PREFIX + "token_type": types})


def test_a_vocabulary_that_cannot_spell_everything_needs_an_unknown_token() -> None:
    metadata = {
        PREFIX + "model": "llama",
        PREFIX + "tokens": ["a"],
        PREFIX + "token_type": [1],
        PREFIX + "scores": [0.0],
    }
    with pytest.raises(TokenizerError, match="unknown_token_id"):
        Tokenizer.from_metadata(metadata)


def test_arrays_and_ids_may_come_from_numpy() -> None:
    arrays = {
        PREFIX + "scores": np.array(SPM[PREFIX + "scores"], np.float32),
        PREFIX + "token_type": np.array(SPM[PREFIX + "token_type"], np.int32),
        PREFIX + "bos_token_id": np.uint32(1),
    }
    assert Tokenizer.from_metadata(SPM | arrays).encode("a") == Tokenizer.from_metadata(SPM).encode("a")


def test_all_ones_means_that_there_is_no_such_token() -> None:
    tokenizer = Tokenizer.from_metadata(SPM | {PREFIX + "bos_token_id": 0xFFFFFFFF})
    assert tokenizer.bos_id is None
    assert not tokenizer.adds_bos


def test_old_files_without_ids_and_types_have_those_of_sentencepiece() -> None:
    keys = ("model", "tokens", "scores")
    tokenizer = Tokenizer.from_metadata({PREFIX + key: SPM[PREFIX + key] for key in keys})
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.decode([1, 2]) == ""


@pytest.mark.parametrize("token", [-1, N, 10**9])
def test_an_id_outside_the_vocabulary_is_an_error(token: int) -> None:
    tokenizer = Tokenizer.from_metadata(SPM)
    for use in (lambda: tokenizer.decode([token]), lambda: tokenizer.token_text(token)):
        with pytest.raises(TokenizerError, match=f"token id {token} is not in"):
            use()


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.lists(st.text(max_size=2), max_size=4)
)


@given(st.dictionaries(st.sampled_from(sorted(SPM | BPE)), values), st.sampled_from([SPM, BPE]))
def test_random_damage_is_an_error_or_harmless(damage: dict[str, object], base: dict[str, object]) -> None:
    complaint, ids = "", None
    try:
        ids = Tokenizer.from_metadata(base | damage).encode("ab c")
    except TokenizerError as error:
        complaint = str(error)
    assert ids is not None or "tokenizer.ggml." in complaint
