"""A model on disk: one GGUF file, or all the parts of a split one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from motley.errors import GGUFError, ModelError
from motley.formats import PackedTensor
from motley.gguf.metadata import Metadata
from motley.gguf.part import Part, read_part
from motley.gguf.tensors import TensorInfo

_PART_NAME = re.compile(r"(?P<stem>.*)-[0-9]{5}-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """Everything a model file says. Tensors are mapped, and read when they are touched."""

    path: Path  # the first part
    metadata: Metadata  # of the first part
    tensors: Mapping[str, TensorInfo]  # of all parts, in file order
    parts: tuple[Part, ...]

    @property
    def architecture(self) -> str:
        return self.metadata.str("general.architecture")

    def tensor(self, name: str) -> PackedTensor:
        """The named tensor, as a view of the mapped file."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: the tensor {name} is missing")
        row_bytes = info.format.row_bytes(info.shape[-1])
        data = torch.frombuffer(
            self.parts[info.part].data, dtype=torch.uint8, count=info.nbytes, offset=info.offset
        )
        return PackedTensor(data.view(*info.shape[:-1], row_bytes), info.format)


def read_spec(path: str | os.PathLike[str]) -> ModelSpec:
    """Opens and checks a GGUF file, and its other parts if it is one of several. Loads nothing."""
    opened = read_part(Path(path))
    parts = _read_parts(opened) if opened.metadata.int("split.count", 1) > 1 else (opened,)
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for info in part.tensors:
            if info.name in tensors:
                raise GGUFError(
                    f"{part.path}: the tensor {info.name!r} is in {parts[tensors[info.name].part].path} too"
                )
            tensors[info.name] = info
    _check_tensor_count(parts[0], len(tensors))
    return ModelSpec(parts[0].path, parts[0].metadata, MappingProxyType(tensors), parts)


def _read_parts(opened: Part) -> tuple[Part, ...]:
    """All parts of a split model, found by name from any one of them."""
    count = opened.metadata.int("split.count")
    match = _PART_NAME.fullmatch(opened.path.name)
    if match is None:
        expected = f"NAME-00001-of-{count:05}.gguf"
        raise GGUFError(
            f"{opened.path}: one of {count} parts, but not named as one",
            hint=f"call them {expected} and so on",
        )
    if int(match["count"]) != count:
        raise GGUFError(
            f"{opened.path}: its name says {int(match['count'])} parts, its key split.count says {count}"
        )
    paths = [opened.path.with_name(f"{match['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise GGUFError(
            f"{opened.path}: parts of the model are missing: {names}",
            hint=f"put them in {opened.path.parent}",
        )
    parts = tuple(read_part(path, index) for index, path in enumerate(paths))
    for index, part in enumerate(parts):
        _check_part(part, index, count)
    return parts


def _check_part(part: Part, index: int, count: int) -> None:
    for key, expected in (("split.no", index), ("split.count", count)):
        found = part.metadata.int(key)
        if found != expected:
            raise GGUFError(f"{part.path}: {key} is {found}, but by its name it should be {expected}")


def _check_tensor_count(first: Part, found: int) -> None:
    expected = first.metadata.int("split.tensors.count", found)
    if found != expected:
        raise GGUFError(
            f"{first.path}: split.tensors.count is {expected}, but the parts hold {found} tensors"
        )
