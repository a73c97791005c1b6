"""The native module's own names for what kernels know, against the tables that the rest of Motley goes by."""

from __future__ import annotations

import pytest

from motley.backends.cpu import is_available
from motley.backends.cpu.native import CACHE_TYPES as NATIVE_CACHE_TYPES
from motley.backends.cpu.native import FORMATS as NATIVE_FORMATS
from motley.backends.cpu.native import FUNCTIONS, PLAIN_FORMATS
from motley.formats import FORMATS
from motley.kvcache.types import CACHE_TYPES

if not is_available():
    pytest.skip("the native module is not built", allow_module_level=True)


def test_every_format_and_cache_type_has_a_native_number() -> None:
    assert set(NATIVE_FORMATS) == set(FORMATS)
    assert set(NATIVE_CACHE_TYPES) == set(CACHE_TYPES)
    assert set(PLAIN_FORMATS) <= set(NATIVE_FORMATS)


def test_numbers_are_distinct_and_no_function_is_zero() -> None:
    for numbers in (NATIVE_FORMATS, NATIVE_CACHE_TYPES, FUNCTIONS):
        assert len(set(numbers.values())) == len(numbers)
    assert FUNCTIONS[""] == 0
