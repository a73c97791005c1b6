"""Sums, differences and comparisons of numbers below 100, bare and in a sentence."""

from __future__ import annotations

from motley.bundled.recall import is_held_out
from training.chat import Task, ask
from training.lexicon import FOODS, NOUNS, Draw

MAX = 99  # the largest number of a question
ITEMS = (
    *(f"{noun}s" for noun in NOUNS if not noun.endswith(("s", "x", "h", "f"))),
    "apples",
    "plums",
    "nuts",
)
ITEMS = tuple(item for item in ITEMS if item not in FOODS or item.endswith("s"))
SUM = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
    "What is {a} plus {b}?",
)
DIFFERENCE = ("What is {a} - {b}?", "{a} - {b}", "How much is {a} minus {b}?", "Subtract {b} from {a}.", "{a} - {b} = ?", "What is {a} minus {b}?")  # fmt: skip


def pair(draw: Draw, sign: str, high: int = MAX) -> tuple[int, int]:
    """Two numbers; the hash of the whole question decides whether training may see it."""
    while True:
        a, b = draw.integer(0, high), draw.integer(0, high)
        if draw.chance(0.25):
            a, b = a % 20, b % 20
        if is_held_out(f"{a} {sign} {b}") == draw.held_out:
            return a, b


def sums(draw: Draw) -> Task:
    kind = draw.random()
    if kind < 0.5:
        a, b = pair(draw, "+")
        return ask("sums", draw.pick(SUM).format(a=a, b=b), f"{a} + {b} = {a + b}.")
    if kind < 0.8:
        a, b = pair(draw, "-")
        a, b = max(a, b), min(a, b)
        return ask("sums", draw.pick(DIFFERENCE).format(a=a, b=b), f"{a} - {b} = {a - b}.")
    return word_sum(draw)


def word_sum(draw: Draw) -> Task:
    name, items, friend = draw.name(), draw.pick(ITEMS), draw.name()
    if draw.chance(0.5):
        a, b = pair(draw, "+", 30)
        text = draw.pick(
            (
                "{n} has {a} {i} and gets {b} more. How many {i} does {n} have now?",
                "{n} has {a} {i}. {f} gives {n} {b} more. How many {i} does {n} have?",
                "There are {a} {i} in one box and {b} {i} in another. How many {i} are there?",
                "{n} found {a} {i} yesterday and {b} today. How many {i} is that?",
            )
        )
        return ask("sums", text.format(n=name, f=friend, a=a, b=b, i=items), f"{a} + {b} = {a + b} {items}.")
    a, b = pair(draw, "-", 30)
    a, b = max(a, b), min(a, b)
    text = draw.pick(
        (
            "{n} has {a} {i} and gives {b} to {f}. How many {i} are left?",
            "{n} had {a} {i} and lost {b} of them. How many {i} does {n} still have?",
            "There were {a} {i} on the table. {n} took {b}. How many {i} are left?",
        )
    )
    return ask("sums", text.format(n=name, f=friend, a=a, b=b, i=items), f"{a} - {b} = {a - b} {items}.")


def comparisons(draw: Draw) -> Task:
    high = draw.pick((20, 99, 99, 999))
    a, b = pair(draw, "<", high)
    if draw.chance(0.2):
        b = a + draw.pick((1, 10, -1)) if a > 1 else a + 1
    kind = draw.integer(0, 4)
    if a == b or kind == 4:
        word, truth = ("larger", a > b) if draw.chance(0.5) else ("smaller", a < b)
        question = draw.pick((f"Is {a} {word} than {b}?", f"Is it true that {a} is {word} than {b}?"))
        answer = f"Yes, {a} is {word} than {b}." if truth else f"No, {a} is not {word} than {b}."
        return ask("comparisons", question, answer)
    if kind == 3:
        values = [draw.integer(0, high) for _ in range(draw.integer(3, 5))]
        word, best = ("largest", max(values)) if draw.chance(0.5) else ("smallest", min(values))
        listed = ", ".join(map(str, values))
        return ask("comparisons", f"Which number is the {word}: {listed}?", f"The {word} is {best}.")
    word, best = ("larger", max(a, b)) if draw.chance(0.5) else ("smaller", min(a, b))
    question = draw.pick((f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?"))
    return ask("comparisons", question, f"{best} is {word}.")
