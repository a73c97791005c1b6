"""--chat-template: a template by its name, or from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from motley.cli.inputs import read_text
from motley.cli.options.text import ChatTemplateFile, ChatTemplateFlag
from motley.errors import ConfigError
from motley.text import ChatTemplate, template_names
from motley.text.named_templates import NAMED
from motley.text.template import PLAIN

_NAMED = {**NAMED, "plain": (PLAIN, ("\n\nUser:", "\nUser:"))}


@dataclass(frozen=True)
class TemplateOptions:
    """The flags that choose a chat template."""

    chat_template: ChatTemplateFlag = None
    chat_template_file: ChatTemplateFile = None

    @property
    def chosen(self) -> str | None:
        """A name or a file."""
        if self.chat_template is not None and self.chat_template_file is not None:
            raise ConfigError("two templates: --chat-template and --chat-template-file", hint="give one")
        if self.chat_template_file is not None:
            return str(self.chat_template_file.absolute())
        return self.chat_template


def resolve_template(metadata: Mapping[str, object], asked: str) -> ChatTemplate:
    """The template called `asked`: a variant in the model file, a common format, or a file with Jinja text."""
    names = template_names(metadata)
    if asked in names:
        return ChatTemplate.from_metadata(metadata, name=asked)
    path = Path(asked)
    if asked in _NAMED:
        source, stops = _NAMED[asked]
    elif _is_file(path):
        source, stops = read_text(path), ()
    else:
        known = ", ".join((*names, *_NAMED))
        raise ConfigError(f"there is no chat template {asked!r}", hint=f"give a file, or one of: {known}")
    return ChatTemplate.from_source(source, metadata, stops=stops)


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False
