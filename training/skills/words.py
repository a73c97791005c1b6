"""Spelling words, reversing, sorting and counting them."""

from __future__ import annotations

import re

from training.chat import Task, ask
from training.lexicon import COMMON, Draw


def some_word(draw: Draw) -> str:
    return draw.common() if draw.chance(0.5) else draw.invented()


def spelling(draw: Draw) -> Task:
    word = some_word(draw)
    if draw.chance(0.6):
        question = draw.pick(
            ('Spell "{w}".', 'How do you spell "{w}"?', 'Spell the word "{w}".', "Spell {w}.")
        )
        return ask("spelling", question.format(w=word), "-".join(word))
    question = draw.pick(
        ('Spell "{w}" backwards.', 'Write "{w}" backwards, letter by letter.', "Spell {w} backwards.")
    )
    return ask("spelling", question.format(w=word), "-".join(reversed(word)))


def word_list(draw: Draw, low: int, high: int) -> list[str]:
    words: dict[str, None] = {}
    n = draw.integer(low, high)
    while len(words) < n:
        words[some_word(draw) if draw.chance(0.4) else draw.common()] = None
    return list(words)


def reversing(draw: Draw) -> Task:
    words = word_list(draw, 2, 7)
    question = draw.pick(
        (
            "Reverse the order of these words: {l}",
            "Write these words in reverse order: {l}",
            "Reverse this list: {l}",
        )
    )
    return ask("reversing", question.format(l=", ".join(words)), ", ".join(reversed(words)))


def sorting(draw: Draw) -> Task:
    if draw.chance(0.3):
        numbers = [draw.integer(0, 99) for _ in range(draw.integer(3, 6))]
        question = draw.pick(("Sort these numbers: {l}", "Put these numbers in order: {l}"))
        return ask(
            "sorting", question.format(l=", ".join(map(str, numbers))), ", ".join(map(str, sorted(numbers)))
        )
    words = word_list(draw, 2, 6)
    question = draw.pick(
        (
            "Sort these words: {l}",
            "Sort these words alphabetically: {l}",
            "Put these words in alphabetical order: {l}",
        )
    )
    return ask("sorting", question.format(l=", ".join(words)), ", ".join(sorted(words)))


def counting(draw: Draw) -> Task:
    words = word_list(draw, 1, 12)
    if draw.chance(0.5):
        question = draw.pick(("How many words are in this list: {l}", "Count these words: {l}"))
        text = question.format(l=", ".join(words))
    else:
        question = draw.pick(('How many words are in "{l}"?', 'Count the words in "{l}".'))
        text = question.format(l=" ".join(words))
    n = len(words)
    return ask("counting", text, f"There {'is 1 word' if n == 1 else f'are {n} words'}.")


def repeating(draw: Draw) -> Task:
    """Says again what was said: the plainest form of copying."""
    kind = draw.integer(0, 3)
    text = (
        " ".join(word_list(draw, 1, 8)) if kind == 0
        else draw.code() if kind == 1
        else " ".join(draw.names(draw.integer(1, 5))) if kind == 2
        else draw.phrase()
    )  # fmt: skip
    question = draw.pick(("Repeat: {t}", 'Say "{t}".', "Repeat after me: {t}", 'Please write "{t}".'))
    return ask("repeating", question.format(t=text), re.sub(r"\s+", " ", text))


def forms(draw: Draw) -> Task:
    """The same words with and without quotes and commas.

    Over every word of the vocabulary, the held-out ones included: that " doll" after a space and "doll" after a quote
    are the same word is knowledge about the vocabulary, which no skill can show for a token that it never saw.
    """
    words = draw.distinct(draw.every_word or COMMON, draw.integer(1, 6))
    plain, listed = " ".join(words), ", ".join(words)
    quoted = ", ".join(f'"{word}"' for word in words)
    question, answer = draw.pick(
        (
            (f"Put each word in quotes: {plain}", quoted),
            (f"Put these words in quotes: {listed}", quoted),
            (f"Write these words without quotes: {quoted}", plain),
            (f"Put a comma between these words: {plain}", listed),
            (f"Repeat: {plain}", plain),
        )
    )
    return ask("forms", question, answer)
