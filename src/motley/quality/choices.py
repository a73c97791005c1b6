"""The cache types to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.errors import ConfigError
from motley.kvcache.state_arena import STATE_TYPES
from motley.kvcache.types import get_cache_type
from motley.models import DecoderParams, rotation_size


@dataclass(frozen=True)
class CacheChoice:
    """A type for K, a type for V, whether the quantized ones are rotated, and the type of recurrent states."""

    k: str
    v: str
    is_rotated: bool = False
    state: str = "f32"

    @property
    def name(self) -> str:
        """`q8_0`, or `q8_0/q4_0` for K and V in different types; `f16@bf16` with states of another type than f32."""
        both = self.k if self.k == self.v else f"{self.k}/{self.v}"
        return both if self.state == "f32" else f"{both}@{self.state}"

    @property
    def is_quantized(self) -> bool:
        return any(get_cache_type(kind).is_quantized for kind in (self.k, self.v))


def parse_choice(text: str) -> CacheChoice:
    """The choice named `q8_0` (K and V) or `q8_0/q4_0` (K, then V), without rotation; after an @ the type of states."""
    kinds, _, state = (part.strip().lower() for part in text.partition("@"))
    if state not in ("", *STATE_TYPES):
        raise ConfigError(
            f"unknown type of recurrent states {state!r}", hint=f"there are: {', '.join(STATE_TYPES)}"
        )
    names = [part.strip() for part in kinds.split("/")]
    if len(names) > 2:
        raise ConfigError(f"{text!r} names {len(names)} types", hint="one for K and one for V: q8_0/q4_0")
    k, v = get_cache_type(names[0]), get_cache_type(names[-1])
    return CacheChoice(k.name, v.name, state=state or "f32")


def parse_choices(text: str, rotations: Sequence[bool] = (True, False)) -> list[CacheChoice]:
    """The choices in a comma-separated list; each quantized type appears once for each of `rotations`."""
    parsed = [parse_choice(part) for part in text.split(",") if part.strip()]
    if not parsed:
        raise ConfigError("no KV cache types to measure", hint="for example q8_0,q4_0,q8_0/q4_0")
    return _distinct(
        [
            replace(choice, is_rotated=is_rotated)
            for choice in parsed
            for is_rotated in (rotations if choice.is_quantized else (False,))
        ]
    )


def applicable(choices: Sequence[CacheChoice], params: DecoderParams) -> list[CacheChoice]:
    """The distinct choices for this model: if no rotation fits its heads, each type once, without rotation."""
    if rotation_size(params.head_dim):
        return list(choices)
    return _distinct([replace(choice, is_rotated=False) for choice in choices])


def _distinct(choices: Sequence[CacheChoice]) -> list[CacheChoice]:
    return list(dict.fromkeys(choices))
