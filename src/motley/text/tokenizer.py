"""Text ↔ token ids, by the rules that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from motley.errors import TokenizerError
from motley.text.bpe import BpeEncoder
from motley.text.detokenizer import DetokenizerStream
from motley.text.marked import MarkedText, plain
from motley.text.sentencepiece import SentencePieceEncoder
from motley.text.special import SpanPredicate, SpecialTokens
from motley.text.vocab import PREFIX, TokenType, Vocabulary

NO_VOCABULARY = "no_vocab"  # what a file without a tokenizer calls its tokenizer


class HasMetadata(Protocol):
    """The part of a `ModelSpec` that this package needs."""

    @property
    def metadata(self) -> Mapping[str, object]: ...


class Tokenizer:
    """Immutable after construction, and safe to share between threads."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._encoder = SentencePieceEncoder(vocab) if vocab.model == "llama" else BpeEncoder(vocab)
        self._special = SpecialTokens(vocab)
        self._hidden = frozenset(vocab.ids_of(TokenType.CONTROL, TokenType.UNKNOWN))
        # Texts of tokens that occurred so far, without control tokens and with them.
        self._texts: dict[bool, dict[int, str]] = {True: {}, False: {}}

    @classmethod
    def from_spec(cls, spec: HasMetadata) -> Tokenizer:
        return cls.from_metadata(spec.metadata)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        if metadata.get(f"{PREFIX}model") == NO_VOCABULARY:
            return NoTokenizer()
        return cls(Vocabulary.from_metadata(metadata))

    @property
    def n_vocab(self) -> int:
        return self._vocab.n_vocab

    @property
    def bos_id(self) -> int | None:
        return self._vocab.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocab.eos_id

    @property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation: the end of the text, of the turn, of the message."""
        return self._vocab.eog_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens without text: `decode` leaves them out."""
        return self._hidden

    @property
    def adds_bos(self) -> bool:
        return self._vocab.add_bos

    @cached_property
    def _ids_by_text(self) -> Mapping[str, int]:
        return {text: i for i, text in reversed(list(enumerate(self._vocab.tokens)))}

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text in the vocabulary, such as "<|im_start|>"."""
        return self._ids_by_text.get(text)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it, such as "▁the" or "<s>"."""
        return self._vocab.tokens[self._checked(token)]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text; they need not be whole characters."""
        return self._encoder.piece(self._checked(token))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text.

        `add_special`: with the tokens that the model wants around a text (a text that already begins with the
        beginning-of-text token does not get a second one). `parse_special`: "<|im_end|>" in the text means
        the token; pass False for text that is not trusted.
        """
        return self._encode(text, add_special, lambda start, end: parse_special)

    def encode_marked(self, text: MarkedText, *, add_special: bool = True) -> list[int]:
        """The ids of a chat prompt. Control tokens are read only where the template wrote them itself.

        Where messages contain none, these are the ids of `encode`.
        """
        return self._encode(text, add_special, text.is_own)

    def _encode(self, text: str, add_special: bool, may_be_control: SpanPredicate) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text is not valid Unicode: {error.reason} at {error.start}",
                hint="text is read as UTF-8",
            ) from None
        ids: list[int] = []
        for part in self._special.split(plain(text), may_be_control):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encoder.encode(part))
        if add_special and self._vocab.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self._vocab.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, after: Sequence[int] = ()) -> str:
        """The text of all ids; see `stream` for `after`."""
        stream = self.stream(skip_special=skip_special, after=after)
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> DetokenizerStream:
        """A decoder for ids that come one by one.

        `after`: the ids that stand before them. SentencePiece puts a space in front of a text, and decoding
        takes it away again; but the space of a first token that continues a text belongs there.
        """

        def piece(token: int) -> bytes:
            if skip_special and token in self._hidden:
                return b""
            return self.token_bytes(token)

        is_continuation = any(piece(token) for token in after)
        drops_space = self._vocab.add_space_prefix and not is_continuation
        return DetokenizerStream(piece, drops_space=drops_space, texts=self._texts[skip_special])

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise TokenizerError(f"token id {token} is not in 0..{self.n_vocab - 1}")
        return token


class NoTokenizer(Tokenizer):
    """The tokenizer of a file without a vocabulary: its model takes and returns token ids only."""

    def __init__(self) -> None:
        pass

    @property
    def n_vocab(self) -> int:
        return 0

    @property
    def bos_id(self) -> int | None:
        return None

    @property
    def eos_id(self) -> int | None:
        return None

    @property
    def eog_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def adds_bos(self) -> bool:
        return False

    def token_text(self, token: int) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes:
        return b""

    @cached_property
    def _ids_by_text(self) -> Mapping[str, int]:
        return {}

    def _encode(self, text: str, add_special: bool, may_be_control: SpanPredicate) -> list[int]:
        raise TokenizerError("this file has no tokenizer", hint="give token ids instead of text")

    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> DetokenizerStream:
        """The stream of ids without text: every piece is empty."""
        return DetokenizerStream(lambda token: b"", drops_space=False)
