"""Fields of a text as JSON, after a schema.

Two kinds of text: sentences about a person, a pet, a parcel …, whose wording differs from the field's name; and
records in which the field's name stands beside its value ("The zorp is 12"), for any name whatever.
The hash of the set of fields decides whether a schema is held out, and the hash of each value as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from motley.bundled.recall import is_held_out
from training.chat import Task, ask, dump
from training.lexicon import (
    ANIMALS,
    COLOURS,
    COMMON,
    DAYS,
    FOODS,
    HOBBIES,
    JOBS,
    MONTHS,
    NOUNS,
    Draw,
    listing,
)  # fmt: skip

Value = str | int | bool | None | list[str]
Maker = Callable[[Draw], Value]
# field: (type, value, sentences); {s} is what the text is about, {v} the value
Field = tuple[str, Maker, tuple[str, ...]]

DOMAINS: dict[str, dict[str, Field]] = {
    "person": {
        "age": ("integer", lambda d: d.integer(3, 98), ("{s} is {v} years old.", "{s} turned {v} in spring.", "At the age of {v}, {s} is still full of plans.")),
        "city": ("string", lambda d: d.town(), ("{s} lives in {v}.", "{s} moved to {v} last year.", "You can visit {s} in {v}.")),
        "job": ("string", lambda d: d.pick(JOBS), ("{s} works as a {v}.", "{s} is a {v}.", "{s} earns a living as a {v}.")),
        "hobby": ("string", lambda d: d.pick(HOBBIES), ("In the evening {s} enjoys {v}.", "{s} spends every weekend with {v}.", "{s} loves {v}.")),
        "pet": ("string", lambda d: d.pick(ANIMALS), ("{s} has a pet {v}.", "At home {s} keeps a {v}.", "A {v} lives with {s}.")),
        "phone": ("string", lambda d: "".join(str(d.integer(0, 9)) for _ in range(d.integer(4, 7))), ("You can call {s} at {v}.", "The phone number of {s} is {v}.")),
        "friends": ("array", lambda d: d.names(d.integer(1, 3)), ("{s} has these friends: {v}.", "The friends of {s} are called {v}.")),
        "married": ("boolean", lambda d: d.chance(0.5), ("{s} is {not}married.",)),
        "birthday": ("string", lambda d: f"{d.pick(MONTHS)} {d.integer(1, 28)}", ("{s} was born on {v}.", "The birthday of {s} is {v}.")),
    },
    "pet": {
        "kind": ("string", lambda d: d.pick(ANIMALS), ("{s} is a {v}.", "{s} is the nicest {v} in town.")),
        "colour": ("string", lambda d: d.pick(COLOURS), ("The fur of {s} is {v}.", "{s} is {v} from head to tail.")),
        "weight": ("integer", lambda d: d.integer(1, 80), ("{s} weighs {v} kilos.", "On the scales {s} showed {v} kilos.")),
        "owner": ("string", lambda d: d.name(), ("{s} belongs to {v}.", "{v} takes care of {s}.")),
        "food": ("string", lambda d: d.pick(FOODS), ("{s} eats nothing but {v}.", "{s} loves {v}.")),
        "tame": ("boolean", lambda d: d.chance(0.5), ("{s} is {not}tame.",)),
        "tricks": ("array", lambda d: d.distinct(COMMON, d.integer(1, 3)), ("{s} knows these tricks: {v}.",)),
    },
    "parcel": {
        "content": ("string", lambda d: d.thing(), ("In parcel {s} there is a {v}.", "Somebody ordered a {v} in parcel {s}.")),
        "price": ("integer", lambda d: d.number(1, 999), ("Parcel {s} costs {v} coins.", "{v} coins were paid for parcel {s}.")),
        "receiver": ("string", lambda d: d.name(), ("Parcel {s} goes to {v}.", "{v} is waiting for parcel {s}.")),
        "sender": ("string", lambda d: d.name(), ("Parcel {s} was sent by {v}.", "{v} packed parcel {s}.")),
        "day": ("string", lambda d: d.pick(DAYS), ("Parcel {s} will arrive on {v}.", "Parcel {s} is due on {v}.")),
        "destination": ("string", lambda d: d.town(), ("Parcel {s} travels to {v}.", "The destination of parcel {s} is {v}.")),
        "fragile": ("boolean", lambda d: d.chance(0.5), ("Parcel {s} is {not}fragile.",)),
    },
    "meeting": {
        "topic": ("string", lambda d: d.phrase(), ("The meeting {s} is about {v}.", "In meeting {s} we talk about {v}.")),
        "room": ("string", lambda d: d.code(), ("Meeting {s} takes place in room {v}.", "For meeting {s}, go to room {v}.")),
        "time": ("string", lambda d: f"{d.integer(0, 23)}:{d.integer(0, 5)}{d.pick('05')}", ("Meeting {s} starts at {v}.", "Be there for {s} at {v}.")),
        "people": ("array", lambda d: d.names(d.integer(2, 4)), ("The people in meeting {s} are {v}.", "Meeting {s} was called for {v}.")),
        "seats": ("integer", lambda d: d.integer(2, 99), ("Meeting {s} has {v} seats.", "There are {v} seats for meeting {s}.")),
        "host": ("string", lambda d: d.name(), ("{v} leads meeting {s}.", "The host of meeting {s} is {v}.")),
    },
}  # fmt: skip
SUBJECT = {"person": "name", "pet": "name", "parcel": "id", "meeting": "title"}

REQUESTS = (
    "Extract the fields {k} from the text as JSON.\n\nText: {t}",
    "Give me {k} as JSON.\n\n{t}",
    "{t}\n\nReturn a JSON object with the fields {k}.",
    "{t}\n\nWrite {k} of this text as JSON.",
)
WITH_SCHEMA = (
    "Extract the data as JSON after this schema.\nSchema: {j}\nText: {t}",
    "Text: {t}\n\nFill this JSON schema: {j}",
    "{t}\n\nAnswer with JSON that fits this schema: {j}",
)


def spoken(value: Value, sentence: str) -> str:
    if isinstance(value, bool):
        return sentence.replace("{not}", "" if value else "not ")
    return sentence.replace("{v}", listing(value) if isinstance(value, list) else str(value))


def schema_of(fields: list[tuple[str, str]]) -> dict[str, Any]:
    """A JSON schema from names and types."""
    types = {
        name: {"type": "array", "items": {"type": "string"}} if kind == "array" else {"type": kind}
        for name, kind in fields
    }
    return {"type": "object", "properties": types, "required": [name for name, _ in fields]}


def may_use(draw: Draw, names: list[str]) -> bool:
    return is_held_out(" ".join(sorted(names))) == draw.held_out


def about_domain(draw: Draw) -> tuple[str, list[tuple[str, str, Value]]]:
    """A text, and the fields that are asked for: name, type, value."""
    domain = draw.pick(tuple(DOMAINS))
    fields = DOMAINS[domain]
    subject = draw.name() if domain in ("person", "pet") else draw.code()
    told = draw.distinct(list(fields), draw.integer(2, min(6, len(fields))))
    values = {name: fields[name][1](draw) for name in told}
    sentences = [spoken(values[name], draw.pick(fields[name][2]).replace("{s}", subject)) for name in told]
    while True:
        asked = draw.distinct(told, draw.integer(1, len(told)))
        found: list[tuple[str, str, Value]] = [(name, fields[name][0], values[name]) for name in asked]
        if draw.chance(0.5):
            found.insert(0, (SUBJECT[domain], "string", subject))
        if draw.chance(0.06) and (absent := [name for name in fields if name not in told]):
            name = draw.pick(absent)
            found.append((name, fields[name][0], None))
        if may_use(draw, [name for name, _, _ in found]):
            return " ".join(sentences), found


RECORD = ("{k}: {v}", "The {k} is {v}.", "Its {k} is {v}.", "{k} = {v}", "The {k}: {v}.")


def about_anything(draw: Draw) -> tuple[str, list[tuple[str, str, Value]]]:
    """A record with arbitrary names and values."""
    n = draw.integer(2, 7)
    style, values = draw.pick(RECORD), {}
    while len(values) < n:
        key = draw.invented() if draw.chance(0.4) else draw.word(NOUNS) if draw.chance(0.3) else draw.common()
        kind = draw.random()
        values[key] = (
            draw.number(0, 9999) if kind < 0.3 else draw.code() if kind < 0.45 else draw.invented() if kind < 0.7
            else draw.name() if kind < 0.85 else draw.phrase()
        )  # fmt: skip
    joint = "\n" if style in ("{k}: {v}", "{k} = {v}") else " "
    text = joint.join(style.format(k=key, v=value) for key, value in values.items())
    asked = draw.distinct(list(values), draw.integer(1, n))
    return text, [
        (key, "integer" if isinstance(values[key], int) else "string", values[key]) for key in asked
    ]


def extraction(draw: Draw) -> Task:
    text, fields = about_domain(draw) if draw.chance(0.6) else about_anything(draw)
    if draw.chance(0.5):
        request = draw.pick(REQUESTS).replace("{k}", listing([name for name, _, _ in fields]))
    else:
        request = draw.pick(WITH_SCHEMA).replace(
            "{j}", dump(schema_of([(name, kind) for name, kind, _ in fields]))
        )
    answer = {name: value for name, _, value in fields}
    return ask("json", request.replace("{t}", text), dump(answer), accepts=lambda text: parse(text) == answer)


def parse(text: str) -> object:
    """The JSON value of an answer, or a string of its own that is equal to nothing wanted."""
    try:
        return json.loads(text)
    except ValueError:
        return f"no JSON: {text}"
