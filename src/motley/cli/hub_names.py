"""Names of models on a hub: USER/REPO[:QUANT], and which files of a repository a name means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from motley.errors import ConfigError

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:\.git)?(?::(?P<quant>[\w.-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:IQ\d\w*|Q\d\w*|MXFP4\w*|TQ\d\w*|BF16|F16|FP16|F32))(?=[-.]|$)", re.IGNORECASE
)
# What is taken if no quantization is named: the usual one, then what is closest to it.
PREFERRED = (
    "Q4_K_M",
    "Q4_K_S",
    "Q4_0",
    "Q5_K_M",
    "Q4_1",
    "IQ4_XS",
    "Q5_K_S",
    "Q5_0",
    "Q6_K",
    "Q8_0",
    "MXFP4",
)


@dataclass(frozen=True)
class HubName:
    """A repository, and the requested quantization."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


@dataclass(frozen=True)
class HubModel:
    """One model of a repository: a GGUF file, or the parts of one in their order."""

    quant: str  # "" if the file's name does not tell
    files: tuple[str, ...]


def parse_name(text: str) -> HubName:
    """ConfigError if `text` is not USER/REPO or USER/REPO:QUANT."""
    found = _NAME.fullmatch(text.strip().removeprefix("https://huggingface.co/").rstrip("/"))
    if found is None:
        raise ConfigError(
            f"{text!r} is not the name of a model on the hub",
            hint="for example USER/REPO or USER/REPO:Q4_K_M",
        )
    quant = found["quant"]
    return HubName(found["repo"], None if quant is None or quant.lower() == "latest" else quant)


def is_hub_name(text: str) -> bool:
    """Whether a file that does not exist looks like a model on the hub: USER/REPO-GGUF."""
    return _NAME.fullmatch(text) is not None and "gguf" in text.lower() and not text.lower().endswith(".gguf")


def find_models(files: Iterable[str]) -> list[HubModel]:
    """The models among a repository's files. Vision parts (mmproj) are not models; incomplete splits are left out."""
    whole: list[HubModel] = []
    parts: dict[str, list[str]] = {}
    for name in sorted(files):
        *folders, base = name.lower().split("/")
        is_inside = (
            ".." not in folders and "" not in folders and "\\" not in name
        )  # a hub is not to be trusted
        if not is_inside or not base.endswith(".gguf") or base.startswith("mmproj"):
            continue
        if _PART.search(name):
            parts.setdefault(_PART.sub("", name), []).append(name)
        else:
            whole.append(HubModel(quant_of(name), (name,)))
    for stem, names in parts.items():
        found = _PART.search(names[0])
        if found is not None and len(names) == int(found[2]):
            whole.append(HubModel(quant_of(stem), tuple(names)))
    return sorted(whole, key=lambda model: model.files)


def quant_of(name: str) -> str:
    """The quantization in a file's name, in capitals: `tiny.Q4_K_M.gguf` has Q4_K_M. "" if there is none."""
    found = _QUANT.findall(_PART.sub("", name).removesuffix(".gguf"))
    return str(found[-1]).upper() if found else ""


def choose(name: HubName, models: Sequence[HubModel], file: str | None = None) -> HubModel:
    """The model that `name` means, or the one that contains `file`. ConfigError with what there is otherwise."""
    if not models:
        raise ConfigError(f"{name.repo} has no GGUF files", hint="choose a repository with GGUF in its name")
    there = ", ".join(model.quant or model.files[0] for model in models)
    if file is not None:
        found = [model for model in models if file in model.files]
        if not found:
            names = ", ".join(model.files[0] for model in models)
            raise ConfigError(f"{name.repo} has no file {file}", hint=f"it has: {names}")
        return found[0]
    if name.quant is not None:
        wanted = name.quant.upper()
        found = [model for model in models if wanted in (model.quant, model.quant.removeprefix("UD-"))]
        if not found:
            raise ConfigError(f"{name.repo} has no {name.quant}", hint=f"it has: {there}")
        return found[0]
    ranked = [model for quant in PREFERRED for model in models if model.quant == quant]
    return (ranked or list(models))[0]
