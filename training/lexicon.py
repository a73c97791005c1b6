"""Words and values that the generated texts are made of, and which of them training may use.

A hash of a word decides whether it is held out (`motley.bundled.recall.is_held_out`): training draws only from the
others, the measurements only from the held-out ones. `Draw` is the source of both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from motley.bundled.recall import CODAS, ONSETS, VOWELS, is_held_out

T = TypeVar("T")

GIRLS = (
    "Ada Alma Amy Anna Asha Bella Bea Cara Clara Cora Daisy Dina Dora Edda Ella Elsa Emma Erin Esme Eva Fay Flora Freya "
    "Gina Grace Greta Hana Hazel Heidi Hilda Ida Ines Iris Isla Ivy Jana Jane Jill Jona Joy Judy June Kate Kira Lara "
    "Lena Lila Lily Lina Lisa Lola Lotte Lucy Luna Maya Mara Mia Milla Mina Mira Molly Nadia Nell Nina Nora Olga Olive "
    "Opal Paula Pia Polly Rita Romy Rosa Ruby Ruth Sally Sara Selma Sofia Stella Susi Tara Tess Thea Tilda Tina Uma Vera "
    "Viola Wanda Willa Yara Zoe Zora"
).split()
BOYS = (
    "Abel Adam Alan Albin Alex Anton Arlo Arno Axel Basil Ben Bernd Bill Boris Bruno Carl Caspar Colin Dan David Dirk "
    "Eddie Eli Emil Eric Ernie Evan Felix Finn Frank Fred George Gus Hamid Hank Hans Harry Henry Hugo Ian Igor Ivan Jack "
    "Jake Jan Jasper Jim Joe Jonas Josef Kai Karl Kim Kurt Lars Leo Levi Liam Linus Louis Luis Luke Marc Marek Max Milo "
    "Moritz Ned Nils Noah Oleg Oscar Otis Otto Paul Pavel Pete Piet Ralf Ravi Rob Rolf Ron Sam Saul Seth Simon Sven Ted "
    "Theo Tim Toby Tom Ugo Victor Vito Walt Will Yuri Zeno"
).split()
# First letters of names: of the hero, if the request does not name one, and of the friend. With the same letters for both,
# a small model's greedy answer gives both the same, most likely name.
HEROES, FRIENDS = "ABCDEFGHIJK", "LMNOPQRSTUVWXYZ"
ANIMALS = (
    "fox bear rabbit mouse hedgehog squirrel frog duck goat cat dog owl badger otter beaver lamb donkey pig hen goose "
    "sparrow crow mole deer turtle pony kitten puppy raccoon penguin"
).split()
# What each thing can do decides how it can be lost: (noun, ways).
THINGS: tuple[tuple[str, str], ...] = (
    *((noun, "rolls") for noun in "ball marble coin button apple ring bead wheel pearl acorn walnut".split()),
    *(
        (noun, "flies")
        for noun in "kite feather hat scarf ribbon letter map leaf flag balloon drawing cap".split()
    ),
    *(
        (noun, "shines")
        for noun in "key bell spoon star watch crown lantern mirror medal whistle locket brooch".split()
    ),
    *(
        (noun, "lies")
        for noun in "book basket cup drum flute lamp shoe mitten blanket doll pencil jar box bag boot cushion rope "
        "teapot stool violin umbrella shovel bucket puzzle".split()
    ),
)
NOUNS = tuple(noun for noun, _ in THINGS)
WAYS = dict(THINGS)
COLOURS = "red blue green yellow white black golden silver purple orange brown pink grey".split()
ADJECTIVES = (*COLOURS, *"little old tiny small pretty lovely funny special".split())
PLACES = (
    "garden forest meadow village market harbour mill orchard farm valley park lake beach castle school library bakery "
    "station barn bridge hill river island tower stable field pond well church windmill"
).split()
ROOMS = "kitchen cellar attic hall bedroom garden yard barn shed garage library office porch pantry stable".split()
FOODS = "soup bread cake pie honey apples plums nuts cheese pancakes berries pears carrots porridge biscuits".split()
JOBS = (
    "baker teacher farmer sailor painter doctor driver singer gardener writer cook carpenter tailor miller pilot "
    "nurse potter weaver fisher clockmaker"
).split()
HOBBIES = (
    "chess painting fishing dancing singing reading rowing knitting hiking swimming cooking juggling".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
CITIES = (
    "Oslo Lima Rome Paris Cairo Delhi Tokyo Quito Bern Riga Vienna Prague Dublin Madrid Lisbon Athens Sofia Tunis Kyoto "
    "Boston Dallas Denver Munich Bremen Krakow Porto Seville Turin Naples Ghent Leeds Perth Accra Nairobi Lagos"
).split()
WEATHER = "sunny rainy cloudy windy snowy stormy foggy clear warm cold".split()
COMMON = (
    "river stone table window garden summer winter paper silver candle bottle ladder carpet pocket rabbit butter market "
    "castle forest island planet rocket tunnel violin wagon yellow zebra anchor basket camera dragon engine farmer "
    "guitar hammer jacket kettle lemon monkey needle orange pencil queen ribbon saddle ticket umbrella valley whale "
    "apple bread chair dance eagle flame grape horse ivory jewel knife light mouse night ocean piano quilt robin sugar "
    "train uncle voice wheat bird cloud desk earth fish gate hill iron jar king leaf moon nest oak path rain sand tree "
    "vine wind yard arm book cup door egg fan gold hat ice jam key lamp map nut owl pen rose sun toy van wave"
).split()
INVENTED_ONE_IN = 3  # names that are invented words
TAKEN = frozenset(word.lower() for word in (*GIRLS, *BOYS, *CITIES, *DAYS, *MONTHS))


class Draw:
    """Random choices for one generator: from the training words, or only from the held-out ones."""

    def __init__(self, rng: random.Random, *, held_out: bool = False, vocabulary: Sequence[str] = ()) -> None:
        """`vocabulary`: further words, which training has and the measurements have not."""
        self.rng, self.held_out = rng, held_out
        self.random = rng.random
        self.every_word = tuple(vocabulary)  # the held-out ones, too
        self.further_words = tuple(word for word in vocabulary if is_held_out(word) == held_out)

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def integer(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self.random() < share

    def distinct(self, items: Sequence[T], n: int) -> list[T]:
        return self.rng.sample(items, n)

    def allowed(self, items: Sequence[str]) -> Sequence[str]:
        """The part of a word list that this generator may use."""
        return split_by_hash(tuple(items), self.held_out)

    def word(self, items: Sequence[str]) -> str:
        return self.pick(self.allowed(items))

    def further(self, share: float) -> bool:
        """Whether a word comes from the further words, where there are any."""
        return bool(self.further_words) and self.random() < share

    def common(self) -> str:
        return self.pick(self.further_words) if self.further(0.6) else self.word(COMMON)

    def invented(self) -> str:
        """A pronounceable word that exists in no language; mostly of the form of the recall drill's."""
        while True:
            syllables = "".join(
                self.pick(ONSETS) + self.pick(VOWELS) for _ in range(self.pick((1, 2, 2, 2, 3)))
            )
            word = syllables + self.pick((*CODAS, "", "n", "l", "r", "s", "t", "m", "d"))
            if len(word) > 2 and is_held_out(word) == self.held_out and word not in TAKEN:
                return word

    def name(self, kind: str = "", initials: str = "") -> str:
        """A first name: `kind` is "girl", "boy" or anything; `initials`: one of these (default: any)."""
        while True:
            name = self._name(kind)
            if not initials or name[0] in initials:
                return name

    def _name(self, kind: str) -> str:
        if not kind and self.further(0.25):
            return self.unusual_name()
        if self.random() * INVENTED_ONE_IN < 1:
            return self.invented().capitalize()
        names = GIRLS if kind == "girl" else BOYS if kind == "boy" else self.pick((GIRLS, BOYS))
        return self.word(names)

    def unusual_name(self) -> str:
        """Made of any word, such as "Withi", so that names are copied and not guessed. Not for stories."""
        while True:
            name = f"{self.pick(self.further_words)}{self.pick(('', 'a', 'o', 'i', 'e', 'n'))}".capitalize()
            if is_held_out(name) == self.held_out:
                return name

    def names(self, n: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < n:
            found[self.name()] = None
        return list(found)

    def town(self) -> str:
        return self.word(CITIES) if self.random() < 0.5 else self.invented().capitalize()

    def thing(self) -> str:
        """ "red kite": the pair is what may be held out."""
        while True:
            thing = f"{self.pick(ADJECTIVES)} {self.pick(NOUNS)}"
            if is_held_out(thing) == self.held_out:
                return thing

    def number(self, low: int, high: int) -> int:
        while True:
            value = self.integer(low, high)
            if high - low < 64 or is_held_out(str(value)) == self.held_out:
                return value

    def code(self) -> str:
        """Letters and digits without a meaning, such as "K7-204"."""
        letters = "".join(self.pick("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(self.integer(1, 3)))
        return f"{letters}{self.pick(('', '-', '-'))}{self.number(10, 9999)}"

    def phrase(self) -> str:
        """One to three invented or common words."""
        return " ".join(
            self.invented()
            if self.random() < 0.5
            else self.pick(self.further_words)
            if self.further(0.6)
            else self.pick(COMMON)
            for _ in range(self.integer(1, 3))
        )


@lru_cache(maxsize=256)
def split_by_hash(items: tuple[str, ...], held_out: bool) -> tuple[str, ...]:
    return tuple(item for item in items if is_held_out(item) == held_out)


def article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def listing(items: Sequence[str], last: str = "and") -> str:
    """ "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}"
