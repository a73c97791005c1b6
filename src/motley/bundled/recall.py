"""Needle-in-a-haystack prompts: text that contains "The secret of X is Y." and ends with "The secret of X is".

A model can only answer by looking X up in its context: X and Y are invented words, and a hash of the
word decides whether training may use it (`is_held_out`). The prompts made here use only held-out words;
`training/` uses only the remaining words. A prompt holds several secrets and asks for one.

No torch here: the caller passes a tokenizer and a text.
"""

from __future__ import annotations

import hashlib
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from motley.errors import ConfigError

Encode = Callable[[str], Sequence[int]]

HELD_OUT_ONE_IN = 8
# Chosen so that no held-out word is a word of the books that the bundled model was trained on.
ONSETS = (*"bdfghjklmnprstvwz", "bl", "br", "dr", "fr", "gl", "gr", "kr", "pl", "pr", "sk", "sl", "tr", "vr")
VOWELS = (*"aeiou", "oa")
CODAS = ("k", "z", "zh", "lf", "lk", "mb", "ndo", "nto", "ps", "rk", "rv", "sk")

SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+")
# More than the average characters per token of English in usual vocabularies: bounds the search for the start.
CHARS_PER_TOKEN = 8


@dataclass(frozen=True)
class RecallPrompt:
    text: str  # the passage; ends with the question
    tokens: tuple[int, ...]  # encode(text)
    answer: str
    distance: int  # tokens from the end of the needle to the end of the prompt


def is_held_out(word: str) -> bool:
    """Whether this word belongs to the test set. Case does not matter."""
    return hashlib.blake2b(word.lower().encode(), digest_size=1).digest()[0] % HELD_OUT_ONE_IN == 0


def pseudo_word(rng: random.Random, *, held_out: bool) -> str:
    """An invented, pronounceable lower-case word from the test set (or from the training set)."""
    while True:
        n_syllables = rng.choice((2, 2, 3))
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(n_syllables)) + rng.choice(
            CODAS
        )
        if is_held_out(word) == held_out:
            return word


def secret(key: str, value: str) -> str:
    """The sentence that is inserted into a passage."""
    return f"The secret of {key} is {value}."


def question(key: str) -> str:
    """The end of a prompt; the answer is a space and the value."""
    return f"The secret of {key} is"


def is_recalled(prompt: RecallPrompt, completion: str) -> bool:
    """Whether a completion begins with the whole answer and nothing but the answer."""
    return re.match(rf"\s*{re.escape(prompt.answer)}(?!\w)", completion) is not None


def make_recall_prompts(
    encode: Encode, text: str, n: int, length: int, seed: int, *, n_secrets: int = 8
) -> list[RecallPrompt]:
    """`n` prompts of at most `length` tokens each (at most one word shorter), taken from `text`.

    The needles' depths are spread evenly over the prompts, from the start of a passage to its end; the other
    `n_secrets` - 1 secrets of a passage are at random depths. The same arguments give the same prompts.
    """
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    if not ends:
        raise ConfigError(
            "the text for recall prompts has no sentences", hint="give it a longer English text"
        )
    rng = random.Random(seed)
    return [_make_prompt(encode, text, ends, length, (i + 0.5) / n, n_secrets, rng) for i in range(n)]


def _make_prompt(
    encode: Encode, text: str, ends: list[int], length: int, depth: float, n_secrets: int, rng: random.Random
) -> RecallPrompt:
    words = _distinct_words(rng, 2 * n_secrets)
    secrets = list(zip([word.capitalize() for word in words[:n_secrets]], words[n_secrets:], strict=True))
    depths = [depth, *(rng.random() for _ in secrets[1:])]
    reach = CHARS_PER_TOKEN * length
    end = rng.choice([e for e in ends if e >= reach] or ends[-1:])

    def compose(start: int) -> str:
        return _hide(text[start:end], secrets, depths) + question(secrets[0][0])

    # The longest passage that fits: a prompt gets shorter as its start moves on, word by word, towards `end`.
    earliest = max(0, end - reach)
    starts = [earliest + match.start() for match in re.finditer(r"\S+", text[earliest:end])]
    first = bisect_left(starts, True, key=lambda start: len(encode(compose(start))) <= length)
    if first == 0 or first == len(starts):
        raise ConfigError(
            f"no recall prompt of {length} tokens with {n_secrets} secrets can be cut from a text of "
            f"{len(text)} characters",
            hint="give a longer text or longer prompts (-c), or ask for fewer secrets or none (--no-recall)",
        )
    prompt = compose(starts[first])
    tokens = tuple(encode(prompt))
    needle = secret(*secrets[0])
    head = prompt[: prompt.index(needle) + len(needle)]
    return RecallPrompt(prompt, tokens, answer=secrets[0][1], distance=len(tokens) - len(encode(head)))


def _hide(passage: str, secrets: list[tuple[str, str]], depths: list[float]) -> str:
    """`passage` with each secret at the next sentence start from its depth on (0: start of the passage, 1: end)."""
    starts = [0, *(match.end() for match in SENTENCE_END.finditer(passage)), len(passage)]
    places = [starts[bisect_left(starts, depth * len(passage))] for depth in depths]
    parts: list[str] = []
    done = 0
    for place, (key, value) in sorted(zip(places, secrets, strict=True)):
        parts += [passage[done:place], secret(key, value), " "]
        done = place
    return "".join([*parts, passage[done:]])


def _distinct_words(rng: random.Random, n: int) -> list[str]:
    words: dict[str, None] = {}  # keeps the order, so that it depends on the seed only
    while len(words) < n:
        words[pseudo_word(rng, held_out=True)] = None
    return list(words)
