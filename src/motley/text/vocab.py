"""The vocabulary of a GGUF file, checked: what `tokenizer.ggml.*` says, as one frozen value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral

from motley.errors import TokenizerError
from motley.text.pretokenizers import PreTokenizer, find_pretokenizer

PREFIX = "tokenizer.ggml."
NO_TOKEN = (0xFFFFFFFF, -1)  # what writers store for "there is no such token"


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a turn or a document in some model. Files name only one or two of theirs in `eos_token_id`
# and `eot_token_id`, and a model that ends its turn with another one would never stop.
END_TEXTS = frozenset(
    {
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<EOT>", "[EOT]"),
        *("<end_of_turn>", "<turn|>", "<end_of_utterance>"),
    }
)

# Only "gpt2" leaves the cutting of words open. (SentencePiece does not cut at all; its entry is never used.)
_IMPLIED_PRE = {"llama": "default", "gemma4": "gemma4"}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the rules of the file for turning text into them."""

    model: str  # "llama": SentencePiece-style, "gpt2" and "gemma4": merges by rank
    pre: PreTokenizer
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]  # only "llama" has them
    merges: tuple[tuple[str, str], ...]  # only the others have them, best first
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    byte_of: Mapping[int, int]  # the byte of each byte token
    right_stripping_ids: frozenset[int]  # special tokens that swallow the white space after them

    @property
    def n_vocab(self) -> int:
        return len(self.tokens)

    def ids_of(self, *types: TokenType) -> Iterable[int]:
        return (i for i, kind in enumerate(self.types) if kind in types)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Read and check every key; a defect is a TokenizerError that names the key."""
        fields = _Fields(metadata)
        model = fields.text("model")
        if model not in ("llama", "gpt2", "gemma4"):
            raise TokenizerError(
                f"{PREFIX}model is {model!r}", hint="Motley knows the tokenizers llama, gpt2 and gemma4"
            )
        is_spm = model == "llama"
        pre = find_pretokenizer(fields.text("pre", "default") if model == "gpt2" else _IMPLIED_PRE[model])
        tokens = fields.texts("tokens")
        types = fields.types(len(tokens))
        ids = {name: fields.token_id(name, len(tokens)) for name in ("bos", "eos", "unknown", "eot", "eom")}
        if is_spm:
            ids = _with_sentencepiece_defaults(ids, fields, types)
        if not fields.has("token_type"):
            named = {i for i in ids.values() if i is not None}
            types = tuple(TokenType.CONTROL if i in named else kind for i, kind in enumerate(types))
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            types=types,
            scores=fields.scores(len(tokens)) if is_spm else (),
            merges=() if is_spm else fields.merges(tokens),
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            unknown_id=ids["unknown"],
            eog_ids=_end_of_generation(tokens, types, ids),
            add_bos=fields.flag("add_bos_token", is_spm or pre.adds_bos) and ids["bos"] is not None,
            add_eos=fields.flag("add_eos_token", False) and ids["eos"] is not None,
            add_space_prefix=is_spm and fields.flag("add_space_prefix", True),
            remove_extra_whitespaces=fields.flag("remove_extra_whitespaces", False),
            byte_of={i: _byte_value(tokens[i], i) for i, kind in enumerate(types) if kind == TokenType.BYTE},
            right_stripping_ids=_right_stripping(metadata, model, tokens, types),
        )


def _with_sentencepiece_defaults(
    ids: dict[str, int | None], fields: _Fields, types: tuple[int, ...]
) -> dict[str, int | None]:
    """SentencePiece numbers <unk>, <s>, </s> 0, 1, 2; old files leave the keys out."""
    defaults = {"unknown": 0, "bos": 1, "eos": 2}
    typed = fields.has("token_type")
    for name, default in defaults.items():
        is_plausible = default < len(types) and not (typed and types[default] == TokenType.NORMAL)
        if not fields.has(f"{name}_token_id") and is_plausible:
            ids[name] = default
    return ids


def _end_of_generation(
    tokens: tuple[str, ...], types: tuple[int, ...], ids: Mapping[str, int | None]
) -> frozenset[int]:
    ends = {i for i, text in enumerate(tokens) if text in END_TEXTS and types[i] != TokenType.NORMAL}
    # Gemma has the tags of HTML as user-defined tokens, and there "</s>" ends what is struck out.
    ends -= {i for i in ends if tokens[i] == "</s>" and types[i] != TokenType.CONTROL}
    ends |= {i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None}
    if {"<|return|>", "<|call|>"} <= {tokens[i] for i in ends}:
        # Then "<|end|>" closes one of several messages of a turn, whatever the file calls it.
        ends -= {i for i in ends if tokens[i] == "<|end|>" and i != ids["eos"]}
    return frozenset(ends)


def _byte_value(text: str, token: int) -> int:
    if not (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)):
        raise _wrong(f"tokens[{token}]", text, "<0xNN>, although its type is byte")
    return int(match[1], 16)


def _right_stripping(
    metadata: Mapping[str, object], model: str, tokens: tuple[str, ...], types: tuple[int, ...]
) -> frozenset[int]:
    """Phi-3's special tokens take the white space that follows them; GGUF has no key that says so."""
    if metadata.get("general.architecture") != "phi3" or model != "llama":
        return frozenset()
    keep = ("<unk>", "<s>", "<|endoftext|>")
    special = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return frozenset(i for i, text in enumerate(tokens) if types[i] in special and text not in keep)


class _Fields:
    """Typed reading of `tokenizer.ggml.*` from any mapping; lists may be lists, tuples or arrays."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def has(self, name: str) -> bool:
        return PREFIX + name in self._metadata

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(PREFIX + name, default)
        if value is None:
            raise _missing(name)
        if not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(PREFIX + name, default)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._list(name)
        if bad := [i for i, v in enumerate(values) if not isinstance(v, str)]:
            raise _wrong(f"{name}[{bad[0]}]", values[bad[0]], "a string")
        return values  # type: ignore[return-value]  # checked just above

    def types(self, n_tokens: int) -> tuple[int, ...]:
        if not self.has("token_type"):
            return (TokenType.NORMAL,) * n_tokens
        values = tuple(int(v) for v in self._numbers("token_type", n_tokens))
        if bad := [i for i, v in enumerate(values) if not 1 <= v <= 6]:
            raise _wrong(f"token_type[{bad[0]}]", values[bad[0]], "a token type from 1 to 6")
        return values

    def scores(self, n_tokens: int) -> tuple[float, ...]:
        values = self._numbers("scores", n_tokens)
        if bad := [i for i, v in enumerate(values) if v != v]:  # NaN has no place in an order
            raise _wrong(f"scores[{bad[0]}]", values[bad[0]], "a number")
        return values

    def merges(self, tokens: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        known = set(tokens)
        pairs = []
        for i, merge in enumerate(self.texts("merges")):
            # The separator is the first space after the first character, which itself may be a space.
            split = merge.find(" ", 1)
            left, right = merge[:split], merge[split + 1 :]
            if split < 0 or left not in known or right not in known or left + right not in known:
                raise _wrong(f"merges[{i}]", merge, "two tokens whose concatenation is a token")
            pairs.append((left, right))
        return tuple(pairs)

    def token_id(self, name: str, n_tokens: int) -> int | None:
        key = f"{name}_token_id"
        value = self._metadata.get(PREFIX + key)
        if value is None or value in NO_TOKEN:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < n_tokens:
            raise _wrong(key, value, f"the id of one of {n_tokens} tokens")
        return int(value)

    def _numbers(self, name: str, n_tokens: int) -> tuple[float, ...]:
        values = self._list(name)
        if len(values) != n_tokens:
            raise TokenizerError(f"{PREFIX}{name} has {len(values)} entries for {n_tokens} tokens")
        try:
            return tuple(map(float, values))  # type: ignore[arg-type]  # what is no number raises here
        except (TypeError, ValueError):
            raise TokenizerError(f"{PREFIX}{name} must hold numbers only") from None

    def _list(self, name: str) -> tuple[object, ...]:
        value = self._metadata.get(PREFIX + name)
        if value is None:
            raise _missing(name)
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise _wrong(name, value, "a list")
        return tuple(value)


def _missing(name: str) -> TokenizerError:
    return TokenizerError(f"{PREFIX}{name} is missing", hint="the file has no usable vocabulary")


def _wrong(name: str, value: object, expected: str) -> TokenizerError:
    return TokenizerError(f"{PREFIX}{name} is {value!r:.60}, not {expected}")
