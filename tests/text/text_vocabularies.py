"""Vocabularies for the tests: those of the reference data, loaded once, and small ones made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from motley.gguf import read_spec
from motley.text import Tokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

PAIRS = ("llama-spm", "phi-3", "gpt-2", "deepseek-llm", "falcon", "starcoder", "qwen2", "llama-bpe")
TOKENIZER_JSON = {"qwen2": "qwen2", "llama-bpe": "llama3"}  # these have no GGUF file


@cache
def metadata_of(vocab_folder: Path, name: str) -> Mapping[str, object]:
    if name in TOKENIZER_JSON:
        return _from_tokenizer_json(vocab_folder / TOKENIZER_JSON[name] / "tokenizer.json", pre=name)
    return read_spec(vocab_folder / f"ggml-vocab-{name}.gguf").metadata


@cache
def tokenizer_of(vocab_folder: Path, name: str) -> Tokenizer:
    return Tokenizer.from_metadata(metadata_of(vocab_folder, name))


def _from_tokenizer_json(path: Path, pre: str) -> dict[str, object]:
    content = json.loads(path.read_text("utf-8"))
    tokens = {i: (text, NORMAL) for text, i in content["model"]["vocab"].items()}
    tokens |= {
        t["id"]: (t["content"], CONTROL if t["special"] else USER_DEFINED) for t in content["added_tokens"]
    }
    by_id = [tokens[i] for i in range(len(tokens))]
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": pre,
        PREFIX + "tokens": [text for text, _ in by_id],
        PREFIX + "token_type": [kind for _, kind in by_id],
        PREFIX + "merges": [" ".join(pair) for pair in content["model"]["merges"]],
    }


def sentencepiece_metadata(
    pieces: Mapping[str, float], *, special: Sequence[tuple[str, int]] = (), **fields: object
) -> dict[str, object]:
    """<unk>, <s>, </s>, the 256 bytes, the pieces with their scores, and further tokens with their types."""
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(text, NORMAL, score) for text, score in pieces.items()]
    tokens += [(text, kind, 0.0) for text, kind in special]
    return {
        PREFIX + "model": "llama",
        PREFIX + "tokens": [text for text, _, _ in tokens],
        PREFIX + "token_type": [kind for _, kind, _ in tokens],
        PREFIX + "scores": [score for _, _, score in tokens],
        PREFIX + "bos_token_id": 1,
        PREFIX + "eos_token_id": 2,
        PREFIX + "unknown_token_id": 0,
    } | {PREFIX + name: value for name, value in fields.items()}


def byte_level_metadata(
    merges: Sequence[str] = (), *, special: Sequence[tuple[str, int]] = (), **fields: object
) -> dict[str, object]:
    """The 256 bytes, one token for each merge, and further tokens with their types."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    tokens = [(chr(byte), NORMAL) for byte in shown]
    tokens += [(chr(0x100 + n), NORMAL) for n in range(256 - len(shown))]
    tokens += [(merge.replace(" ", ""), NORMAL) for merge in merges]
    tokens += special
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": "gpt-2",
        PREFIX + "tokens": [text for text, _ in tokens],
        PREFIX + "token_type": [kind for _, kind in tokens],
        PREFIX + "merges": list(merges),
    } | {PREFIX + name: value for name, value in fields.items()}
