"""Little stories with a world behind them: who is there, what they want, what is in the way, and what follows from it.

A story is told by a plot (`training.plots`): a sequence of beats, each with several wordings. The world keeps names,
pronouns, things and places the same from the first sentence to the last, and knows the answers to questions.
`check_story` finds out whether a text keeps to its own world, whoever wrote it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from training.lexicon import ADJECTIVES, ANIMALS, FOODS, FRIENDS, HEROES, NOUNS, PLACES, WAYS, Draw, article

PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
TRAITS = "kind brave shy curious cheerful clever quiet careful lively patient gentle stubborn".split()
TIMES = (
    "One morning",
    "One day",
    "One evening",
    "One sunny day",
    "One windy morning",
    "One cold morning",
    "On a warm afternoon",
    "One Sunday",
)


@dataclass(frozen=True)
class Being:
    name: str
    kind: str  # "girl", "boy" or an animal
    gender: str  # "he" or "she"

    @staticmethod
    def draw(draw: Draw, *, kind: str = "", name: str = "", avoid: tuple[Being, ...] = ()) -> Being:
        taken = {being.kind for being in avoid}
        while not kind or kind in taken & set(ANIMALS):
            kind = draw.pick(("girl", "boy")) if draw.chance(0.5) else draw.pick(ANIMALS)
        gender = {"girl": "she", "boy": "he"}.get(kind) or draw.pick(("he", "she"))
        while not name or name in {being.name for being in avoid}:
            name = draw.name("girl" if gender == "she" else "boy", FRIENDS if avoid else HEROES)
        return Being(name, kind, gender)


@dataclass
class World:
    """What a story is about. `words` fills the blanks of its sentences."""

    draw: Draw
    hero: Being
    friend: Being
    thing: str  # "red kite"
    place: str
    other_place: str
    food: str
    trait: str
    facts: list[tuple[str, str]] = field(default_factory=list)  # question, answer
    words: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @staticmethod
    def make(draw: Draw, *, hero: Being | None = None, thing: str = "", place: str = "") -> World:
        hero = hero or Being.draw(draw)
        friend = Being.draw(draw, avoid=(hero,))
        place = place or draw.pick(PLACES)
        other = draw.pick([p for p in PLACES if p != place])
        world = World(
            draw, hero, friend, thing or draw.thing(), place, other, draw.pick(FOODS), draw.pick(TRAITS)
        )
        world.words = world._make_words()
        return world

    @property
    def noun(self) -> str:
        return self.thing.split()[-1]

    def _make_words(self) -> dict[str, str]:
        he, him, his = PRONOUNS[self.hero.gender]
        fhe, fhim, fhis = PRONOUNS[self.friend.gender]
        return {
            "h": self.hero.name, "f": self.friend.name, "kind": self.hero.kind, "fkind": self.friend.kind,
            "he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize(),
            "fhe": fhe, "fhim": fhim, "fhis": fhis, "fHe": fhe.capitalize(), "fHis": fhis.capitalize(),
            "thing": self.thing, "athing": article(self.thing), "noun": self.noun, "place": self.place,
            "other": self.other_place, "food": self.food, "trait": self.trait,
            "akind": article(self.hero.kind), "afkind": article(self.friend.kind),
            "atrait": article(f"{self.trait} {self.hero.kind}"),
        }  # fmt: skip

    def tell(self, *options: str) -> str:
        """One of the wordings, its blanks filled; none is used twice in a story."""
        fresh = [option for option in options if option not in self.used] or list(options)
        option = self.draw.pick(fresh)
        self.used.add(option)
        return option.format_map(self.words)

    def fact(self, question: str, answer: str) -> None:
        self.facts.append((question.format_map(self.words), answer.format_map(self.words)))


@dataclass(frozen=True)
class Story:
    text: str
    names: tuple[str, ...]
    thing: str
    facts: tuple[tuple[str, str], ...]


NAME_BEFORE = re.compile(r"\b(?:named|called|friend|sister|brother|was|is) ([A-Z][a-z]+)\b")
NAMED = re.compile(r"\b(?:(?:named|called)|friend, (?:an? )?) ?([A-Z]\w+)")
CAPITALISED = re.compile(r"(?<=[a-z,;] )([A-Z][a-z]+)\b")
NO_NAMES = frozenset({"I", "Sunday"})
LOOP_WINDOW, LOOP_SIZE, LOOP_TIMES = 120, 4, 3


def has_loop(tokens: list[int] | list[str]) -> bool:
    """Whether a 4-gram occurs three times within 120 tokens: a story that turns in circles does that at once."""
    seen: dict[tuple[int | str, ...], list[int]] = {}
    for i in range(len(tokens) - LOOP_SIZE + 1):
        places = seen.setdefault(tuple(tokens[i : i + LOOP_SIZE]), [])
        places.append(i)
        if len(places) >= LOOP_TIMES and i - places[-LOOP_TIMES] < LOOP_WINDOW:
            return True
    return False


def check_story(
    text: str, *, names: tuple[str, ...] = (), thing: str = "", kinds: tuple[str, ...] = ()
) -> str:
    """ "" if the text keeps to its world, otherwise what is wrong with it.

    `names`, `thing` and `kinds` are what the request named. All of them must occur. Further names must be introduced
    ("a fox named Ada"), once, and used again. The thing keeps its colour, and no new thing appears in the last
    sentences. A character who is a girl is not "he". The text ends with a sentence's end.
    """
    adjective, _, noun = thing.rpartition(" ")
    for wanted in (*names, *kinds, noun):
        if wanted and not re.search(rf"\b{re.escape(wanted)}s?\b", text):
            return f"{wanted!r} does not occur"
    for name, times in Counter(NAMED.findall(text)).items():
        if times > 1:
            return f"two characters are named {name!r}"
    introduced = set(NAME_BEFORE.findall(text)) - NO_NAMES
    for name in set(CAPITALISED.findall(text)) - NO_NAMES:
        if name not in introduced and name not in names:
            return f"{name!r} comes out of nowhere"
    words = re.findall(r"\w+", text)
    counts = Counter(words)
    for name in introduced:
        if counts[name] < 2:
            return f"{name!r} is introduced and forgotten"
    if noun and (others := adjectives_of(noun, text) - {adjective}):
        return f"the {thing} turns into a {others.pop()} one"
    late = len(words) * 19 // 20
    for other in set(words[late:]) & set(NOUNS) - set(words[:late]):
        return f"{other!r} appears at the end"
    for gender, kinds_of_it in (("he", "girls? girl"), ("she", "boys? boy")):
        is_other = re.search(rf"\b({'|'.join(kinds_of_it.split())}) named\b", text)
        if is_other and counts[gender] + counts[gender.capitalize()] and not has_gender(text, gender):
            return f"there is nobody who is {gender!r}"
    if not text.rstrip().endswith((".", "!", '"', "?")):
        return "it stops within a sentence"
    return "" if len(words) >= 60 else "it is too short"


def adjectives_of(noun: str, text: str) -> set[str]:
    return set(re.findall(rf"\b(\w+) {noun}\b", text)) & set(ADJECTIVES)


def has_gender(text: str, gender: str) -> bool:
    """Whether somebody in the text may be called "he" (or "she"): an animal, or a boy (or a girl)."""
    kinds = (
        *ANIMALS,
        "boy" if gender == "he" else "girl",
        "uncle" if gender == "he" else "aunt",
        "mother",
        "grand",
    )
    return any(re.search(rf"\b{kind}", text) for kind in kinds)


def way_of(thing: str) -> str:
    """How a thing gets lost: it "rolls", "flies", "shines" or "lies"."""
    return WAYS.get(thing.split()[-1], "lies")
