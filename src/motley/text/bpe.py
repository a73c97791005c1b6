"""BPE with a list of merges (`tokenizer.ggml.model` = gpt2, gemma4), run by the `tokenizers` library.

Byte-level vocabularies spell each of the 256 bytes as one printable character. A few leave out bytes that
their training text never had (control characters); like every implementation of them, this one drops these.
"""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from motley.text.vocab import TokenType, Vocabulary

SPACE = "\u2581"  # how vocabularies that are not byte-level write a space


def _byte_alphabet() -> dict[str, int]:
    """The character that spells each byte: itself if it can be seen, else the next one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()


class BpeEncoder:
    """Text without special tokens → ids, and ids → bytes."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._engine = _engine(vocab)

    def encode(self, text: str) -> list[int]:
        # Of the ways to encode this one releases the GIL, and computes no offsets: half the time.
        (found,) = self._engine.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        if (byte := self._vocab.byte_of.get(token)) is not None:
            return bytes((byte,))
        text = self._vocab.tokens[token]
        if self._vocab.types[token] not in (TokenType.NORMAL, TokenType.UNUSED):
            return text.encode()
        if not self._vocab.pre.is_byte_level:
            return text.replace(SPACE, " ").encode()
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in text)
        except KeyError:  # padding that a converter made up
            return text.encode()


def _engine(vocab: Vocabulary) -> tokenizers.Tokenizer:
    pre = vocab.pre
    # Control tokens stay out: ordinary text must never turn into one.
    hidden = (TokenType.CONTROL, TokenType.UNKNOWN)
    ids = {text: i for i, text in enumerate(vocab.tokens) if vocab.types[i] not in hidden}
    merges = [(a, b) for a, b in vocab.merges if a in ids and b in ids and a + b in ids]
    engine = tokenizers.Tokenizer(
        models.BPE(ids, merges, ignore_merges=pre.ignores_merges, byte_fallback=not pre.is_byte_level)
    )
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.is_byte_level:
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        engine.normalizer = normalizers.Replace(" ", SPACE)
    if pre.normalizes:
        engine.normalizer = normalizers.NFC()
    return engine
