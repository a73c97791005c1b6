"""The table of formats."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from motley.errors import ModelError
from motley.formats.block32 import BLOCK32_FORMATS
from motley.formats.block256 import BLOCK256_FORMATS
from motley.formats.mxfp4 import MXFP4_FORMAT
from motley.formats.packed import Format
from motley.formats.plain import PLAIN_FORMATS

FORMATS: Mapping[str, Format] = MappingProxyType(
    {f.name: f for f in (*PLAIN_FORMATS, *BLOCK32_FORMATS, *BLOCK256_FORMATS, MXFP4_FORMAT)}
)


def get_format(name: str) -> Format:
    """The format of that name (in any case), or a `ModelError` that lists the known ones."""
    try:
        return FORMATS[name.upper()]
    except KeyError:
        raise ModelError(
            f"the format {name} is not supported", hint=f"supported: {', '.join(FORMATS)}"
        ) from None
