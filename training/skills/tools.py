"""Calling a tool with the right arguments, and answering from its result.

A tool is a verb, an object and parameters; the request says the same in words. The hash of the tool's name decides
whether it is held out, the hash of each value as everywhere. Some requests fit none of the tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from motley.bundled.recall import is_held_out
from training.chat import Message, Task, dump
from training.lexicon import COLOURS, DAYS, MONTHS, ROOMS, WEATHER, Draw, listing

# verb: what a description says, and how a request begins; {o} is the object
VERBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "get": ("Gets the {o}.", ("What is the {o}", "Show me the {o}", "Get the {o}", "Tell me the {o}")),
    "find": ("Finds a {o}.", ("Find a {o}", "Look for a {o}", "I need a {o}", "Can you find a {o}")),
    "book": ("Books a {o}.", ("Book a {o}", "Please book a {o}", "I want to book a {o}")),
    "order": ("Orders a {o}.", ("Order a {o}", "I would like to order a {o}", "Please order a {o}")),
    "send": ("Sends a {o}.", ("Send a {o}", "Please send a {o}", "I want to send a {o}")),
    "set": ("Sets the {o}.", ("Set the {o}", "Please set the {o}", "Change the {o}")),
    "create": ("Creates a {o}.", ("Create a {o}", "Make a new {o}", "Please create a {o}")),
    "delete": ("Deletes a {o}.", ("Delete the {o}", "Remove the {o}", "Please delete the {o}")),
    "check": ("Checks the {o}.", ("Check the {o}", "Please check the {o}", "Can you check the {o}")),
    "start": ("Starts the {o}.", ("Start the {o}", "Please start the {o}", "Turn on the {o}")),
    "stop": ("Stops the {o}.", ("Stop the {o}", "Please stop the {o}", "Turn off the {o}")),
    "open": ("Opens the {o}.", ("Open the {o}", "Please open the {o}", "I want the {o} to be open")),
    "count": ("Counts each {o}.", ("Count each {o}", "How often is there a {o}", "Count every {o}")),
    "rent": ("Rents a {o}.", ("Rent a {o}", "I want to rent a {o}", "Please rent a {o}")),
    "cancel": ("Cancels the {o}.", ("Cancel the {o}", "Please cancel the {o}", "I want to cancel the {o}")),
    "update": ("Updates the {o}.", ("Update the {o}", "Please update the {o}", "Renew the {o}")),
}
OBJECTS = (
    "weather temperature forecast price table room ticket flight train hotel car bike taxi message email letter alarm "
    "timer lamp heater door window gate file note task event meeting order parcel invoice bill song movie book recipe "
    "map route pump fan oven printer camera report account balance stock score menu seat boat tent garden engine light "
    "password contact photo playlist channel server database backup job ticker sensor valve lock"
).split()
PERSON = lambda d: d.name()  # noqa: E731
PLACE = lambda d: d.town()  # noqa: E731
# parameter: (type, description, value, words in the request)
Parameter = tuple[str, str, Callable[[Draw], Any], tuple[str, ...]]
PARAMETERS: dict[str, Parameter] = {
    "city": ("string", "The city", PLACE, ("in {v}", "in the city of {v}")),
    "person": ("string", "The person", PERSON, ("for {v}",)),
    "sender": ("string", "Who sends it", PERSON, ("sent by {v}",)),
    "recipient": ("string", "Who gets it", PERSON, ("to {v}",)),
    "day": ("string", "The day", lambda d: d.pick(DAYS), ("on {v}",)),
    "date": ("string", "The date", lambda d: f"{d.pick(MONTHS)} {d.integer(1, 28)}", ("on {v}", "at the date {v}")),
    "time": ("string", "The time", lambda d: f"{d.integer(0, 23)}:{d.integer(0, 5)}{d.pick('05')}", ("at {v}", "at {v} o'clock")),
    "count": ("integer", "How many", lambda d: d.integer(1, 99), ("{v} times", "with a count of {v}")),
    "people": ("integer", "Number of people", lambda d: d.integer(1, 40), ("for {v} people",)),
    "minutes": ("integer", "Minutes", lambda d: d.integer(1, 99), ("for {v} minutes", "of {v} minutes")),
    "price": ("integer", "The highest price", lambda d: d.number(1, 999), ("for at most {v} coins", "below {v} coins")),
    "room": ("string", "The room", lambda d: d.pick(ROOMS), ("in the {v}", "of the {v}")),
    "colour": ("string", "The colour", lambda d: d.pick(COLOURS), ("in {v}", "with the colour {v}")),
    "title": ("string", "The title", lambda d: d.phrase(), ('with the title "{v}"', 'called "{v}"')),
    "text": ("string", "The text", lambda d: d.phrase(), ('saying "{v}"', 'with the text "{v}"')),
    "code": ("string", "The code", lambda d: d.code(), ("with the code {v}", "number {v}")),
    "level": ("integer", "The level", lambda d: d.integer(1, 100), ("to {v}", "at level {v}")),
    "origin": ("string", "Where it starts", PLACE, ("from {v}",)),
    "destination": ("string", "Where it goes", PLACE, ("going to {v}", "towards {v}")),
    "location": ("string", "The place", PLACE, ("in {v}", "near {v}")),
    "name": ("string", "The name", PERSON, ("for {v}", "with the name {v}")),
    "message": ("string", "The message", lambda d: d.phrase(), ('saying "{v}"', 'with the message "{v}"')),
    "amount": ("integer", "The amount", lambda d: d.number(1, 9999), ("with an amount of {v}", "amount {v}")),
    "key": ("string", "The key", lambda d: d.invented(), ("with the key {v}", "under the key {v}")),
}  # fmt: skip
# Parameters whose words would be mistaken for each other never stand in the same tool.
CLASHES = ({"day", "date"}, {"city", "location", "room", "colour"}, {"text", "message"}, {"recipient", "level", "destination"}, {"people", "person", "name", "minutes"}, {"time", "level"})  # fmt: skip
RESULTS: dict[str, Callable[[Draw], Any]] = {
    "status": lambda d: d.pick(("done", "ready", "open", "closed", "running", "waiting", "confirmed")),
    "temperature": lambda d: d.integer(-20, 40),
    "weather": lambda d: d.pick(WEATHER),
    "price": lambda d: d.number(1, 999),
    "number": lambda d: d.number(1, 9999),
    "code": lambda d: d.code(),
    "name": lambda d: d.name(),
    "place": lambda d: d.town(),
    "time": lambda d: f"{d.integer(0, 23)}:{d.integer(0, 5)}{d.pick('05')}",
    "day": lambda d: d.pick(DAYS),
    "count": lambda d: d.integer(0, 99),
    "title": lambda d: d.phrase(),
    "owner": lambda d: d.name(),
    "key": lambda d: d.invented(),
}
ERRORS = (
    "not found",
    "no answer",
    "not allowed",
    "out of order",
    "no such city",
    "too late",
    "already closed",
)
NO_TOOL = "I have no tool for that."


@dataclass(frozen=True)
class Tool:
    verb: str
    object: str
    parameters: tuple[str, ...]
    optional: tuple[str, ...] = ()  # the last of the parameters: may be left out
    is_described: bool = True

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.object}"

    def spec(self) -> dict[str, Any]:
        """As the OpenAI API describes it."""
        properties = {
            name: {"type": PARAMETERS[name][0]}
            | ({"description": PARAMETERS[name][1]} if self.is_described else {})
            for name in self.parameters
        }
        required = [name for name in self.parameters if name not in self.optional]
        parameters = {"type": "object", "properties": properties, "required": required}
        description = VERBS[self.verb][0].format(o=self.object)
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    def request(self, draw: Draw) -> tuple[str, dict[str, Any]]:
        """A request in words, and the arguments that it means."""
        given = [name for name in self.parameters if name not in self.optional or draw.chance(0.5)]
        arguments = {name: PARAMETERS[name][2](draw) for name in given}
        spoken = [draw.pick(PARAMETERS[name][3]).replace("{v}", str(arguments[name])) for name in given]
        if draw.chance(0.3):
            draw.rng.shuffle(spoken)
        start = draw.pick(VERBS[self.verb][1]).format(o=self.object)
        end = "?" if start.startswith(("What", "Can", "How")) else draw.pick((".", ".", ""))
        return " ".join((start, *spoken)) + end, arguments


def draw_tool(draw: Draw, taken: tuple[Tool, ...] = ()) -> Tool:
    while True:
        verb, noun = draw.pick(tuple(VERBS)), draw.pick(OBJECTS)
        if is_held_out(f"{verb}_{noun}") != draw.held_out or any(
            verb == tool.verb and noun == tool.object for tool in taken
        ):
            continue
        wanted = draw.distinct(tuple(PARAMETERS), draw.pick((0, 1, 1, 2, 2, 3, 3, 4)))
        chosen: list[str] = []
        for name in wanted:
            if not any(name in group and group & set(chosen) for group in CLASHES):
                chosen.append(name)
        optional = tuple(chosen[-1:]) if len(chosen) > 1 and draw.chance(0.2) else ()
        return Tool(verb, noun, tuple(chosen), optional, is_described=draw.chance(0.7))


def draw_tools(draw: Draw) -> tuple[Tool, ...]:
    """One to five; some share a verb or an object."""
    tools: tuple[Tool, ...] = ()
    for _ in range(draw.pick((1, 1, 2, 2, 3, 3, 4, 5))):
        tools += (draw_tool(draw, tools),)
    return tools


def calls_of(text: str) -> list[tuple[str, object]]:
    """The calls in an answer; one that cannot be read counts as a call of nothing."""
    found: list[tuple[str, object]] = []
    for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(body)
            found.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            found.append(("", body))
    return found


def call(draw: Draw, tools: tuple[Tool, ...] | None = None) -> Task:
    """A request for one of the tools."""
    tools = tools or draw_tools(draw)
    tool = draw.pick(tools)
    text, arguments = tool.request(draw)
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": tool.name, "arguments": arguments}],
    }
    return Task(
        "tool call",
        ({"role": "user", "content": text}, message),
        tools=tuple(each.spec() for each in tools),
        accepts=lambda answer: calls_of(answer) == [(tool.name, arguments)],
    )


def result_of(draw: Draw) -> tuple[dict[str, Any], str]:
    """What a tool returns, and the sentence that says so."""
    if draw.chance(0.12):
        error = draw.pick(ERRORS)
        return {"error": error}, f"That did not work: {error}."
    keys = draw.distinct(tuple(RESULTS), draw.pick((1, 1, 2, 2, 3)))
    result = {key: RESULTS[key](draw) for key in keys}
    return result, answer_from(result)


def answer_from(result: Mapping[str, Any]) -> str:
    parts = [f"the {key} is {value}" for key, value in result.items()]
    text = listing(parts)
    return f"{text[0].upper()}{text[1:]}."


def use(draw: Draw, tools: tuple[Tool, ...] | None = None) -> Task:
    """A request, a call, its result, and the answer from it."""
    first = call(draw, tools)
    result, answer = result_of(draw)
    messages = (
        *first.messages,
        {"role": "tool", "content": dump(result)},
        {"role": "assistant", "content": answer},
    )
    return Task("tool result", messages, tools=first.tools)


def no_tool(draw: Draw, tools: tuple[Tool, ...] | None = None) -> Task:
    """A request that needs a tool which is not there."""
    tools = tools or draw_tools(draw)
    while True:
        missing = draw_tool(draw, tools)
        if missing.parameters and all(missing.object != tool.object for tool in tools):
            break
    text, _ = missing.request(draw)
    specs = tuple(tool.spec() for tool in tools)
    return Task(
        "no tool", ({"role": "user", "content": text}, {"role": "assistant", "content": NO_TOOL}), tools=specs
    )


def work(draw: Draw) -> list[Task]:
    """A conversation with tools: one to three requests, each answered from its tool's result."""
    tools = draw_tools(draw)
    tasks = []
    for _ in range(draw.pick((1, 1, 2, 3))):
        kind = draw.random()
        tasks.append(no_tool(draw, tools) if kind < 0.08 else use(draw, tools))
    return tasks
