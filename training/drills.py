"""Windows of the books, and recall drills in them.

A drill is a window of a book with sentences "The secret of X is Y." put into it. When X occurs first, its Y
cannot be known; when it occurs again, Y is the answer, and only answers count in a drill's loss. So the books
are learned from the windows alone (drills cannot wear them out), and looking up from the drills alone.
X and Y are mostly invented words outside the hold-out of `motley.bundled.recall`, sometimes numbers, scraps
of the books or arbitrary tokens, so that copying does not depend on what is copied.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from motley.bundled.recall import is_held_out, pseudo_word
from training.corpus import Split
from training.vocabulary import BOS_ID, EOS_ID, N_VOCAB, SPECIAL

Ids = NDArray[np.int16]
NO_LOSS, TEXT, ANSWER = range(3)  # what a token counts as, when it is the target

N_WORDS = 40_000
AS_PRINTED_SHARE = 0.2  # of text windows


@dataclass(frozen=True)
class Books:
    """The training text of all books as two streams of tokens: lines joined, and as printed."""

    joined: Ids
    printed: Ids

    @staticmethod
    def encode(tokenizer: Tokenizer, splits: tuple[Split, Split]) -> Books:
        """Each chapter is closed by the end token."""
        streams = []
        for split in splits:
            chapters = [chapter for book in split.train for chapter in book]
            parts = [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(chapters)]
            streams.append(np.fromiter((i for part in parts for i in part), np.int16))
        return Books(*streams)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, joined=self.joined, printed=self.printed)

    @staticmethod
    def load(path: Path) -> Books:
        with np.load(path) as file:
            return Books(file["joined"], file["printed"])


@dataclass(frozen=True)
class Phrases:
    """Token ids of things that can be a key or a value, all with a leading space."""

    keys: list[Ids]  # capitalised invented words in alphabetical order: neighbours look alike
    values: list[Ids]

    @staticmethod
    def make(tokenizer: Tokenizer, seed: int) -> Phrases:
        rng = random.Random(seed)
        words = sorted({pseudo_word(rng, held_out=False) for _ in range(N_WORDS)})
        numbers = [str(n) for n in range(100, 20_000, 3) if not is_held_out(str(n))]
        pairs = [f"{rng.choice(words)} {rng.choice(words)}" for _ in range(N_WORDS // 8)]

        def encode(phrases: list[str]) -> list[Ids]:
            return [
                np.array(e.ids, np.int16)
                for e in tokenizer.encode_batch([f" {phrase}" for phrase in phrases])
            ]

        return Phrases(encode([word.capitalize() for word in words]), encode(words + numbers + pairs))


class Drills:
    """Makes one sequence at a time; one per worker process."""

    def __init__(self, tokenizer: Tokenizer, books: Books, rng: np.random.Generator) -> None:
        self.books, self.rng = books, rng
        self.phrases = Phrases.make(tokenizer, int(rng.integers(1 << 30)))

        def encode(text: str) -> Ids:
            return np.array(tokenizer.encode(text).ids, np.int16)

        self.openings = [encode(t) for t in (" The secret of",) * 3 + (" the secret of", "\n\nThe secret of")]
        self.verb, self.stop = encode(" is"), encode(".")
        closers = [
            i for i in range(N_VOCAB) if tokenizer.decode([i]).strip() in {".", "!", "?", '."', '!"', '?"'}
        ]
        self.sentence_ends = np.flatnonzero(np.isin(books.joined, closers)) + 1

    def key(self, known: list[int]) -> tuple[int, Ids]:
        """A fresh key, and its place in the alphabet (-1: none). Some look much like a known one."""
        kind = self.rng.random()
        if kind < 0.2:
            return -1, self.scrap()
        index = int(self.rng.integers(len(self.phrases.keys)))
        if kind < 0.4 and known:
            index = int(self.rng.choice(known) + self.rng.integers(-2, 3)) % len(self.phrases.keys)
        return index, self.phrases.keys[index]

    def value(self) -> Ids:
        if self.rng.random() < 0.2:
            return self.scrap()
        return self.phrases.values[self.rng.integers(len(self.phrases.values))]

    def scrap(self) -> Ids:
        """One to four tokens: of the books, or arbitrary ones."""
        n = int(self.rng.integers(1, 5))
        if self.rng.random() < 0.5:
            return self.rng.integers(len(SPECIAL), N_VOCAB, n).astype(np.int16)
        start = self.rng.integers(len(self.books.joined) - n)
        scrap = self.books.joined[start : start + n]
        return scrap[scrap >= len(SPECIAL)] if (scrap >= len(SPECIAL)).any() else self.stop

    def sentences(self, n: int, n_exam: int) -> Iterator[tuple[Ids, NDArray[np.int8]]]:
        """`n` secrets. The last `n_exam` repeat earlier ones; without an exam, every second one does."""
        facts: list[tuple[Ids, Ids]] = []
        known: list[int] = []
        seen: set[bytes] = set()
        exam: list[tuple[Ids, Ids]] = []
        repeats = 0.5 if n_exam == 0 else 0.1
        for i in range(n):
            if i == n - n_exam:
                exam = [facts[j] for j in self.rng.permutation(len(facts))]
            is_repeat = bool(facts) and (i >= n - n_exam or self.rng.random() < repeats)
            if is_repeat:
                key, value = exam.pop() if exam else facts[self.rng.integers(len(facts))]
            else:
                index, key = self.key(known)
                value = self.value()
                if key.tobytes() in seen:
                    continue
                seen.add(key.tobytes())
                facts.append((key, value))
                known += [index] if index >= 0 else []
            opening = self.openings[self.rng.integers(len(self.openings))]
            ids = np.concatenate((opening, key, self.verb, value, self.stop))
            kinds = np.zeros(len(ids), np.int8)
            if is_repeat:
                kinds[-len(value) - 1 :] = ANSWER
            yield ids, kinds

    def drill(self, length: int) -> tuple[Ids, NDArray[np.int8]]:
        rng, books = self.rng, self.books.joined
        n = int(rng.integers(4, 5 + length // 48))
        n_exam = int(rng.integers(1, n // 2 + 1)) if rng.random() < 0.6 else 0
        parts = list(self.sentences(n, n_exam))
        n_text = length - 1 - sum(len(ids) for ids, _ in parts)
        start = int(rng.integers(len(books) - n_text))
        window = books[start : start + n_text]
        # Places between sentences; a power above 1 crowds the secrets at the front, far from the exam.
        lo, hi = np.searchsorted(self.sentence_ends, (start, start + n_text))
        ends = np.concatenate(([0], self.sentence_ends[lo:hi] - start))
        depths = np.sort(rng.random(len(parts)) ** rng.choice((1, 3)))
        places = ends[(depths * len(ends)).astype(int)]
        if n_exam:
            places[len(parts) - n_exam :] = n_text
        ids, kinds, done = [np.array([BOS_ID], np.int16)], [np.zeros(1, np.int8)], 0
        for place, (part, kind) in zip(places, parts, strict=True):
            ids += [window[done:place], part]
            kinds += [np.zeros(place - done, np.int8), kind]
            done = place
        ids.append(window[done:])
        kinds.append(np.zeros(n_text - done, np.int8))
        return np.concatenate(ids), np.concatenate(kinds)

    def window(self, length: int) -> tuple[Ids, NDArray[np.int8]]:
        """A piece of a book; every token counts."""
        books = self.books.printed if self.rng.random() < AS_PRINTED_SHARE else self.books.joined
        start = int(self.rng.integers(len(books) - length))
        ids = np.concatenate((np.array([BOS_ID], np.int16), books[start : start + length - 1]))
        return ids, np.full(length, TEXT, np.int8)
