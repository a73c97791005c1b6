"""Telling stories, on request."""

from __future__ import annotations

from training.chat import Task, ask
from training.lexicon import ANIMALS, HEROES, PLACES, Draw, article
from training.plots import write_story
from training.stories import Being, Story, check_story

STORY = "story"
FREE = (
    "Tell me a story.",
    "Tell me a little story.",
    "Can you tell me a story?",
    "Please tell me a bedtime story.",
    "Write a short story.",
    "I would like to hear a story.",
    "Once upon a time",
    "A story, please!",
    "Make up a story for me.",
)
ABOUT = (
    "Tell me a story about {x}.",
    "Tell a story about {x}.",
    "Can you tell me a story about {x}?",
    "Write a story about {x}.",
    "Please write a little story about {x}.",
    "I want to hear a story about {x}.",
    "A story about {x}, please.",
    "Make up a story with {x}.",
    "Write a short story about {x}.",
)

NAMES_THE_HERO = (2, 6, 7)  # forms of `story_request`


def story_request(draw: Draw) -> tuple[str, Story, dict[str, object]]:
    """A request, a story that fits, and what `check_story` should look for."""
    kind = draw.pick(("girl", "boy")) if draw.chance(0.45) else draw.pick(ANIMALS)
    gender = {"girl": "she", "boy": "he"}.get(kind) or draw.pick(("he", "she"))
    form = draw.integer(0, 7)
    initials = "" if form in NAMES_THE_HERO else HEROES
    hero = Being(draw.name("girl" if gender == "she" else "boy", initials), kind, gender)
    thing, place = draw.thing(), draw.pick(PLACES)
    wanted: dict[str, object] = {}
    match form:
        case 0:
            return draw.pick(FREE), write_story(draw), wanted
        case 1:
            x, wanted = article(kind), {"kinds": (kind,)}
        case 2:
            x, wanted = f"{article(kind)} named {hero.name}", {"kinds": (kind,), "names": (hero.name,)}
        case 3:
            x, wanted = article(thing), {"thing": thing}
        case 4:
            x, wanted = f"{article(kind)} in the {place}", {"kinds": (kind, place)}
        case 5:
            x, wanted = f"{article(kind)} and {article(thing)}", {"kinds": (kind,), "thing": thing}
        case _:
            x = f"{article(kind)} named {hero.name} and {article(thing)}"
            wanted = {"kinds": (kind,), "names": (hero.name,), "thing": thing}
    story = write_story(draw, hero=hero, thing=thing, place=place)
    if form == 4 and place not in story.text:
        return f"Tell me a story about {article(kind)}.", story, {"kinds": (kind,)}
    return draw.pick(ABOUT).format(x=x), story, wanted


def tell(draw: Draw) -> Task:
    request, story, wanted = story_request(draw)
    accepts = lambda text: check_story(text, **wanted) == ""  # type: ignore[arg-type]  # noqa: E731
    return ask(STORY, request, story.text, accepts=accepts)


def tell_and_ask(draw: Draw) -> list[Task]:
    """A story, then one or two questions about it."""
    request, story, _ = story_request(draw)
    facts = draw.distinct(story.facts, min(len(story.facts), draw.integer(1, 2)))
    return [
        ask(STORY, request, story.text),
        *(ask("context", question, answer) for question, answer in facts),
    ]
