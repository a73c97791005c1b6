"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from motley.cli.conversation import Conversation, Turn
from motley.cli.figures import show_figures
from motley.cli.inputs import read_text, write_file
from motley.cli.report import in_flags, say
from motley.engine import SamplingParams
from motley.errors import ConfigError, RequestError

_VERSION = 1  # of saved conversations
_CACHE_SUFFIX = ".cache"  # of the session beside a saved conversation
# Names that /set takes, besides those of SamplingParams.
_SHORT = {"temp": "temperature", "n": "max_tokens", "predict": "max_tokens", "typical": "typical_p"}
_SETTABLE = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "max_tokens",
)


@dataclass
class ChatState:
    """The state that commands change: the conversation, and how the chat shows it."""

    conversation: Conversation
    shows_statistics: bool = False
    has_ended: bool = False
    again: str | None = None  # a message to be answered now: after /regen


@dataclass(frozen=True)
class ChatCommand:
    usage: str
    help: str
    run: Callable[[ChatState, str], None]


def run_command(line: str, state: ChatState) -> None:
    """Runs the command in `line`. Errors are raised, unknown commands explained."""
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        say(f"There is no {name}. A message can begin with a slash if you type two.\n{_list()}")
    else:
        command.run(state, argument.strip())


def _list() -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.help}" for command in COMMANDS.values()]
    keys = (
        ("Ctrl-C", "stop the answer"),
        ("Alt-Enter", "begin a new line; so does a backslash at the end of a line"),
        ('"""', "begin and end a message of several lines"),
        ("//text", "a message that begins with a slash"),
    )
    return "\n".join([*lines, *(f"{key:{width}}  {text}" for key, text in keys)])


def _help(state: ChatState, argument: str) -> None:
    found = [c for name, c in COMMANDS.items() if argument and name.lstrip("/") in argument.lower().split()]
    say("\n".join(f"{c.usage}  {c.help}" for c in found) if found else _list())


def _quit(state: ChatState, argument: str) -> None:
    state.has_ended = True


def _clear(state: ChatState, argument: str) -> None:
    state.conversation.clear()
    say("The conversation is empty.")


def _undo(state: ChatState, argument: str) -> None:
    if not state.conversation.turns:
        raise ConfigError("there is nothing to undo")
    turn = state.conversation.turns.pop()
    say(f"Removed your last message and its answer: {_short(turn.text)}")


def _regen(state: ChatState, argument: str) -> None:
    if not state.conversation.turns:
        raise ConfigError("there is no answer to generate again")
    state.again = state.conversation.turns.pop().text


def _set(state: ChatState, argument: str) -> None:
    name, _, value = argument.partition(" ")
    params = state.conversation.params
    if not name:
        say("\n".join(f"{each} {getattr(params, each)}" for each in _SETTABLE))
        return
    field = name.lstrip("-").replace("-", "_")
    field = _SHORT.get(field, field)
    if field not in _SETTABLE:
        raise ConfigError(f"/set has no {name!r}", hint=f"there are: {', '.join(('temp', *_SETTABLE[1:]))}")
    try:
        state.conversation.params = replace(params, **{field: _number(field, value.strip())})
    except RequestError as error:
        raise ConfigError(*_as_set(error, name)) from None
    say(f"{name} is now {getattr(state.conversation.params, field)}.")


def _as_set(error: RequestError, name: str) -> tuple[str]:
    return (f"/set {name}: {in_flags(error).hint or error.message}",)


def _number(field: str, text: str) -> Any:
    kind = next(each.type for each in fields(SamplingParams) if each.name == field)
    if "None" in str(kind) and text in ("", "-1", "none"):
        return None
    try:
        return int(text) if "int" in str(kind) else float(text)
    except ValueError:
        raise ConfigError(
            f"/set {field}: {text!r} is not a number", hint="for example /set temp 0.7"
        ) from None


def _system(state: ChatState, argument: str) -> None:
    conversation = state.conversation
    if not conversation.is_chat:
        raise ConfigError("a system prompt needs a chat template", hint="start with -cnv")
    if argument:
        conversation.system = None if argument == "-" else argument
    say(
        f"The system prompt is: {conversation.system}"
        if conversation.system
        else "There is no system prompt."
    )


def _save(state: ChatState, argument: str) -> None:
    path, with_cache = _file(argument)
    conversation = state.conversation
    contents = {
        "motley_conversation": _VERSION,
        "system": conversation.system,
        "turns": [{"text": turn.text, "answer": turn.answer} for turn in conversation.turns],
    }
    write_file(path, json.dumps(contents, ensure_ascii=False, indent=1))
    said = f"Saved {_turns(conversation)} to {path}."
    if with_cache and conversation.last is not None:
        cache = path.with_name(path.name + _CACHE_SUFFIX)
        n_bytes = conversation.llm.save_session(cache, conversation.all_tokens())
        said += f" The cache is in {cache} ({n_bytes} bytes)."
    say(said)


def _load(state: ChatState, argument: str) -> None:
    path, _ = _file(argument)
    system, turns = _parse(path)
    conversation = state.conversation
    cache = path.with_name(path.name + _CACHE_SUFFIX)
    if cache.exists():
        conversation.llm.load_session(cache)
    conversation.system, conversation.turns = system, turns
    say(f"Loaded {_turns(conversation)} from {path}{' and its cache' if cache.exists() else ''}.")


def _parse(path: Path) -> tuple[str | None, list[Turn]]:
    try:
        contents = json.loads(read_text(path))
        if contents["motley_conversation"] != _VERSION:
            raise ValueError
        turns = [Turn(turn["text"], turn["answer"]) for turn in contents["turns"]]
        system = contents["system"]
        is_text = all(isinstance(text, str) for turn in turns for text in (turn.text, turn.answer))
        if not is_text or not isinstance(system, str | None):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is not a saved conversation", hint="/save writes one") from None
    return system, turns


def _file(argument: str) -> tuple[Path, bool]:
    """The file, and whether the word `cache` follows it."""
    name, _, last = argument.rpartition(" ")
    with_cache = bool(name) and last == "cache"
    name = name.strip() if with_cache else argument
    if not name:
        raise ConfigError("there is no file name", hint="for example /save chat.json")
    return Path(name).expanduser(), with_cache


def _stats(state: ChatState, argument: str) -> None:
    if argument in ("on", "off"):
        state.shows_statistics = argument == "on"
        say(f"Statistics after each answer: {argument}.")
    elif state.conversation.last is None:
        say("There is no answer yet.")
    else:
        show_figures(state.conversation.last, state.conversation.llm.memory())


def _markdown(state: ChatState, argument: str) -> None:
    conversation = state.conversation
    conversation.renders_markdown = (
        argument == "on" if argument in ("on", "off") else not conversation.renders_markdown
    )
    say(f"Markdown is {'rendered' if conversation.renders_markdown else 'shown as it is'}.")


def _turns(conversation: Conversation) -> str:
    n = len(conversation.turns)
    return f"{n} turn{'' if n == 1 else 's'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


COMMANDS = {
    "/help": ChatCommand("/help [COMMAND]", "show this list, or what one command does", _help),
    "/clear": ChatCommand("/clear", "forget what was said; the system prompt stays", _clear),
    "/regen": ChatCommand("/regen", "answer your last message again", _regen),
    "/undo": ChatCommand("/undo", "remove your last message and its answer", _undo),
    "/set": ChatCommand("/set [NAME VALUE]", "change sampling, as in /set temp 0.7; or show it", _set),
    "/system": ChatCommand("/system [TEXT]", "change the system prompt (-: none), or show it", _system),
    "/save": ChatCommand(
        "/save FILE [cache]", "save the conversation, and its KV cache if you say so", _save
    ),
    "/load": ChatCommand("/load FILE", "continue a saved conversation", _load),
    "/stats": ChatCommand("/stats [on|off]", "show speed and memory, or show them after each answer", _stats),
    "/markdown": ChatCommand("/markdown [on|off]", "render Markdown, or show it as it is", _markdown),
    "/quit": ChatCommand("/quit", "leave; so does Ctrl-D", _quit),
    "/exit": ChatCommand("/exit", "the same", _quit),
}
