"""A byte-level BPE vocabulary of 4096 tokens that makes copying and spelling easy.

Merges join letters only, never a space with a letter, and no digits. So a rare word is cut the same way wherever it
stands (`" Drewark"` in a sentence and `"Drewark"` in JSON differ by one token in front), and numbers are digits.
Common words with their space, and common punctuation, are tokens as wholes: the `llama-bpe` pre-tokenizer takes a
piece of text that is a token whole, without looking at merges. All bytes are tokens: any text fits.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

N_VOCAB = 4096
N_MERGES = 2300
BOS, EOS, PAD, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CONTROL = (BOS, EOS, PAD, IM_START, IM_END)  # ids 0 … 4
MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIAL = (*CONTROL, *MARKS)
BOS_ID, EOS_ID, PAD_ID, IM_START_ID, IM_END_ID = range(5)
PRE = "llama-bpe"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def make_tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


def learn_merges(texts: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Merges within runs of ASCII letters, and the tokens that they make, in order."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^A-Za-z]+"), "removed")
    trainer = trainers.BpeTrainer(vocab_size=N_MERGES + 52, show_progress=False, min_frequency=2)
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]
    ]
    return ["".join(merge) for merge in merges], merges


def train_tokenizer(texts: list[str], *, never: Iterable[str] = ()) -> Tokenizer:
    """Merges from all texts, whole tokens from what is most frequent in them; `never`: words that stay in pieces."""
    pieces, merges = learn_merges(texts)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys((*SPECIAL, *alphabet, *pieces))
    pre = pre_tokenizer()
    counts: Counter[str] = Counter()
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    for text in texts:
        for part in special.split(text):
            counts.update(piece for piece, _ in pre.pre_tokenize_str(part))
    banned = {form for word in never for form in (word, f"Ġ{word}")}
    for piece, _ in counts.most_common():
        if len(tokens) == N_VOCAB:
            break
        # "-a" would blur what letters a spelled word has; digits stay alone.
        is_mixed = (
            piece[0] != "Ġ" and not piece[0].isalpha() and any(c.isascii() and c.isalpha() for c in piece)
        )
        if piece not in banned and not is_mixed and not any(c.isdigit() for c in piece):
            tokens[piece] = None
    assert len(tokens) == N_VOCAB
    tokenizer = make_tokenizer({token: i for i, token in enumerate(tokens)}, merges)
    assert tokenizer.encode("".join(SPECIAL)).ids == list(range(len(SPECIAL)))
    return tokenizer


def whole_words(tokenizer: Tokenizer) -> list[str]:
    """The lower-case words that are a token together with the space before them."""
    return sorted(token[1:] for token in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{3,}", token))


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
