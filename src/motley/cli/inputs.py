"""The model file and the text of a command."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from motley.bundled import bundled_model_path
from motley.cli.hub_names import is_hub_name, parse_name
from motley.cli.options.model import HfFile, HfRepo, HfToken, Model, ModelFlag, Offline
from motley.cli.report import say
from motley.errors import ConfigError
from motley.units import show_bytes

MAX_TEXT = 256 << 20  # bytes of a text
_WRITE_HINT = "FILE must be in a writable folder with free space"


@dataclass(frozen=True)
class ModelOptions:
    """The flags that name a model: a file, or one on a hub."""

    model: Model = None
    model_flag: ModelFlag = None
    hf_repo: HfRepo = None
    hf_file: HfFile = None
    hf_token: HfToken = None
    offline: Offline = False

    @property
    def given(self) -> str | None:
        """The model's name; None: the bundled one."""
        names = [str(name) for name in (self.model, self.model_flag, self.hf_repo) if name is not None]
        if len(names) > 1:
            raise ConfigError(f"two models: {names[0]} and {names[1]}", hint="give one of them")
        return names[0] if names else None

    def path(self) -> Path:
        """The model's file, downloaded if it is one on a hub; the bundled one if none is named."""
        if self.given is None:
            return bundled_model_path()
        if self.hf_repo is not None:
            return fetch_from_hub(self.hf_repo, self.hf_file, self.hf_token, is_offline=self.offline)
        return existing_model(Path(self.given))


def fetch_from_hub(
    name: str, file: str | None = None, token: str | None = None, *, is_offline: bool = False
) -> Path:
    """The file of a model on a hub, with a progress bar while it is downloaded."""
    from motley.cli.console import loading_bar
    from motley.cli.hub import Hub

    parsed = parse_name(name)
    hub = Hub(token=token, is_offline=is_offline)
    with loading_bar(f"Downloading {parsed}") as (progress, _):
        return hub.fetch(parsed, progress, say, file)


def existing_model(path: Path) -> Path:
    """`path`, if there is such a file."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", hint="give the path of a .gguf file in it")
        is_there = path.exists()
    except OSError:  # a parent folder is not readable, or this is not a valid path
        is_there = False
    if not is_there:
        raise ConfigError(
            f"there is no file {path}",
            hint=f"-hf {path} downloads it"
            if is_hub_name(str(path))
            else "MODEL is the path of a .gguf file; a prompt goes after -p",
        )
    return path


def resolve_text(prompt: str | None, file: Path | None) -> str | None:
    """The text of -p or -f; None if neither is given."""
    if prompt is not None and file is not None:
        raise ConfigError("two texts: -p and -f", hint="give one of them")
    if file is None:
        return prompt
    if str(file) == "-":
        text = sys.stdin.read(MAX_TEXT + 1)
        if len(text) > MAX_TEXT:
            raise _too_long("standard input")
        return text
    return read_text(file)


def read_text(file: Path) -> str:
    """The text of a file, refused if it is longer than any text: some files, such as /dev/zero, have no end."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_TEXT + 1)
        if len(raw) > MAX_TEXT:
            raise _too_long(str(file))
        return raw.decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}", hint="-f takes a text file, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}", hint="convert it to UTF-8 first"
        ) from error


def _too_long(source: str) -> ConfigError:
    return ConfigError(f"{source} has more than {show_bytes(MAX_TEXT)}", hint="give a shorter text")


def unescape(text: str | None) -> str | None:
    r"""`text` with \n, \r, \t, \", \', \\ and \xHH read as in llama.cpp; other backslashes stay."""
    if text is None:
        return None
    simple = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}
    return re.sub(
        r"\\(?:x([0-9a-fA-F]{2})|(.))",
        lambda found: chr(int(found[1], 16)) if found[1] else simple.get(found[2], found[0]),
        text,
    )


def check_writable(file: Path | None) -> None:
    """Raises if a file cannot be written, before the work for its contents begins."""
    if file is None:
        return
    try:
        can_be = file.parent.is_dir() and not file.is_dir()
    except OSError:
        can_be = False
    if not can_be:
        raise ConfigError(f"cannot write {file}", hint=_WRITE_HINT)


def write_file(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", hint=_WRITE_HINT) from error
