"""The words of a command line, before they are parsed: each flag is found by its whole name.

The parser would take `-ngl 99` for `-n gl`. Here a flag with several letters is known, or refused with flags that are
spelled like it. A value may follow a one-letter flag directly only if it is a number: `-c128`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from motley.cli.llama_flags import SWITCH_WORDS, UNUSED
from motley.errors import ConfigError


@dataclass
class CommandLine:
    """The words for the parser; what was typed for each flag that takes a value; llama.cpp's flags without effect."""

    words: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)  # by flag, as typed
    unused: dict[str, str] = field(
        default_factory=dict
    )  # the flag, with its value if it has one, and the reason

    @property
    def notice(self) -> str | None:
        """One sentence about flags without effect."""
        if not self.unused:
            return None
        return "no effect here: " + "; ".join(f"{flag} ({why})" for flag, why in self.unused.items())


def read_words(words: Iterable[str], takes_value: Mapping[str, bool], command: str) -> CommandLine:
    """The command line of `command`, whose flags, each with whether a value follows, are `takes_value`."""
    line = CommandLine()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            line.words += [word, *rest]
            break
        name, is_attached, value = word.partition("=")
        if not _is_flag(word):
            line.words.append(word)
        elif name in takes_value:
            line.words.append(word)
            if takes_value[name] and not is_attached and rest:
                value = rest.pop(0)
                line.words.append(value)
            line.values[name] = value
        elif takes_value.get(word[:2]) and _is_number(word[2:]):
            line.words += [word[:2], word[2:]]
            line.values[word[:2]] = word[2:]
        elif name in UNUSED:
            flag = UNUSED[name]
            follows = flag.takes_value or (flag.is_switch and rest[:1] and rest[0].lower() in SWITCH_WORDS)
            shown = f"{word} {rest.pop(0)}" if follows and not is_attached and rest else word
            line.unused[shown] = flag.reason
        else:
            raise _unknown(name, takes_value, command)
    return line


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _unknown(name: str, known: Iterable[str], command: str) -> ConfigError:
    alike = get_close_matches(name, known, n=3, cutoff=0.7) if len(name) > 2 else []
    hint = f"did you mean {' or '.join(alike)}? " if alike else ""
    return ConfigError(f"unknown flag {name}", hint=f"{hint}{command} --help lists the flags")
