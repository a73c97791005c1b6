"""Questions about a text in the context, also such that the text does not answer, and secrets to be looked up."""

from __future__ import annotations

from collections.abc import Callable

from training.chat import Task, ask
from training.lexicon import COLOURS, DAYS, FOODS, HOBBIES, JOBS, NOUNS, ROOMS, Draw, article
from training.plots import write_story

UNKNOWN = "I do not know. The text does not say it."

# relation: (statements, questions, answers), about {s} (a name or a thing) and its value {v}
Relation = tuple[tuple[str, ...], tuple[str, ...], str]
RELATIONS: dict[str, Relation] = {
    "place": (
        ("{s} is in the {v}.", "You can find {s} in the {v}.", "{s} was put in the {v}.", "{s} stands in the {v}."),
        ("Where is {s}?", "Where can I find {s}?", "In which room is {s}?"),
        "{s} is in the {v}.",
    ),
    "home": (
        ("{s} lives in {v}.", "{s} comes from {v}.", "The home of {s} is {v}.", "{s} has a house in {v}."),
        ("Where does {s} live?", "In which town does {s} live?"),
        "{s} lives in {v}.",
    ),
    "job": (
        ("{s} works as a {v}.", "{s} is a {v}.", "{s} became a {v} last year.", "Everyone knows {s}, the {v}."),
        ("What does {s} do for a living?", "What is the job of {s}?", "What does {s} work as?"),
        "{s} works as a {v}.",
    ),
    "food": (
        ("{s} likes {v}.", "{s} loves to eat {v}.", "For {s} there is nothing better than {v}.", "{s} eats {v} every day."),
        ("What does {s} like to eat?", "What does {s} like?"),
        "{s} likes {v}.",
    ),
    "owns": (
        ("{s} has {v}.", "{s} owns {v}.", "{s} bought {v}.", "There is {v} that belongs to {s}."),
        ("What does {s} have?", "What does {s} own?", "What belongs to {s}?"),
        "{s} has {v}.",
    ),
    "age": (
        ("{s} is {v} years old.", "{s} turned {v} this year.", "The age of {s} is {v}."),
        ("How old is {s}?", "What is the age of {s}?"),
        "{s} is {v} years old.",
    ),
    "hobby": (
        ("{s} enjoys {v}.", "The hobby of {s} is {v}.", "In the evening {s} likes {v}."),
        ("What is the hobby of {s}?", "What does {s} do for fun?"),
        "The hobby of {s} is {v}.",
    ),
    "day": (
        ("{s} comes on {v}.", "{s} will arrive on {v}.", "{s} is coming to visit on {v}."),
        ("When does {s} come?", "On which day does {s} come?"),
        "{s} comes on {v}.",
    ),
    "friend": (
        ("The best friend of {s} is {v}.", "{s} has a good friend, {v}.", "{s} often plays with {v}."),
        ("Who is the friend of {s}?", "Who is the best friend of {s}?"),
        "The friend of {s} is {v}.",
    ),
    "colour": (
        ("{s} is {v}.", "The colour of {s} is {v}.", "Somebody painted {s} {v}."),
        ("What colour is {s}?", "Which colour does {s} have?"),
        "{s} is {v}.",
    ),
}  # fmt: skip
OF_PEOPLE = ("home", "job", "food", "owns", "age", "hobby", "day", "friend")
OF_THINGS = ("place", "colour")

VALUES: dict[str, Callable[[Draw], str]] = {
    "place": lambda draw: draw.pick(ROOMS),
    "home": lambda draw: draw.town(),
    "job": lambda draw: draw.pick(JOBS),
    "food": lambda draw: draw.pick(FOODS),
    "owns": lambda draw: article(draw.thing()),
    "age": lambda draw: str(draw.integer(3, 98)),
    "hobby": lambda draw: draw.pick(HOBBIES),
    "day": lambda draw: draw.pick(DAYS),
    "friend": lambda draw: draw.name(),
    "colour": lambda draw: draw.pick(COLOURS),
}

FRAMES = (
    "{t}\n\n{q}",
    "Text: {t}\n\nQuestion: {q}",
    "{t} {q}",
    "Read this: {t}\n\n{q}",
    "{q}\n\n{t}",
)


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def facts_of(draw: Draw, n: int) -> list[tuple[str, str, str]]:
    """Facts (relation, subject, value), no (relation, subject) twice."""
    people = draw.names(draw.integer(1, 4))
    things = [f"the {noun}" for noun in draw.distinct(NOUNS, draw.integer(1, 4))]
    facts: dict[tuple[str, str], str] = {}
    while len(facts) < n:
        is_thing = draw.chance(0.3)
        relation = draw.pick(OF_THINGS if is_thing else OF_PEOPLE)
        subject = draw.pick(things if is_thing else people)
        facts.setdefault((relation, subject), VALUES[relation](draw))
        if draw.chance(0.02):
            people.append(draw.name())
    return [(relation, subject, value) for (relation, subject), value in facts.items()]


def context(draw: Draw) -> Task:
    """A question about a handful of facts, or about a little story. One in eight has no answer in the text."""
    if draw.chance(0.25):
        return story_question(draw)
    facts = facts_of(draw, draw.integer(2, 10))
    sentences = [
        capital(draw.pick(RELATIONS[relation][0]).format(s=subject, v=value))
        for relation, subject, value in facts
    ]
    text = " ".join(sentences)
    if draw.chance(0.125):
        return unanswered(draw, text, facts)
    relation, subject, value = draw.pick(facts)
    _, questions, answer = RELATIONS[relation]
    question = draw.pick(questions).format(s=subject, v=value)
    return ask(
        "context", draw.pick(FRAMES).format(t=text, q=question), capital(answer.format(s=subject, v=value))
    )


def unanswered(draw: Draw, text: str, facts: list[tuple[str, str, str]]) -> Task:
    known = {(relation, subject) for relation, subject, _ in facts}
    while True:
        relation, subject, _ = draw.pick(facts)
        if draw.chance(0.5):
            relation = draw.pick(OF_THINGS if subject.startswith("the ") else OF_PEOPLE)
        else:
            subject = f"the {draw.pick(NOUNS)}" if subject.startswith("the ") else draw.name()
        if (relation, subject) not in known:
            break
    question = draw.pick(RELATIONS[relation][1]).format(s=subject)
    return ask("unknown", draw.pick(FRAMES).format(t=text, q=question), UNKNOWN)


def story_question(draw: Draw) -> Task:
    story = write_story(draw)
    question, answer = draw.pick(story.facts)
    return ask("context", draw.pick(FRAMES[:4]).format(t=story.text, q=question), answer)


def secrets(draw: Draw) -> Task:
    """The recall drill as a conversation."""
    n = draw.integer(1, 8)
    keys = draw.names(n) if draw.chance(0.3) else [draw.invented().capitalize() for _ in range(n)]
    values = [draw.invented() if draw.chance(0.7) else draw.code() for _ in keys]
    pairs = list(zip(keys, values, strict=True))
    sentences = [f"The secret of {key} is {value}." for key, value in pairs]
    for _ in range(draw.integer(0, 3)):
        relation, subject, value = facts_of(draw, 1)[0]
        sentence = capital(draw.pick(RELATIONS[relation][0]).format(s=subject, v=value))
        sentences.insert(draw.integer(0, len(sentences)), sentence)
    key, value = draw.pick(pairs)
    value = dict(pairs)[key]
    question = draw.pick((f"What is the secret of {key}?", f"Tell me the secret of {key}."))
    return ask(
        "secrets",
        draw.pick(FRAMES).format(t=" ".join(sentences), q=question),
        f"The secret of {key} is {value}.",
    )
