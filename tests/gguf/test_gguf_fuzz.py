"""Damaged files: always a clean `MotleyError` or a sound result; never a crash, a hang or much memory."""

from __future__ import annotations

import json
import random
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf.constants import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_gguf import array, gguf_file, key, small_model

from motley.errors import GGUFError, MotleyError
from motley.gguf import describe, read_spec
from thorough import examples

SOUND = small_model()
DATA_BYTES = 128 + 144
HEADER_BYTES = len(SOUND) - DATA_BYTES
HEADROOM = 128 * 2**20  # bytes

Reader = Callable[[bytes], bool]


@pytest.fixture
def is_readable(tmp_path: Path) -> Reader:
    """Reads all there is in a file; False if that ended in a clean error."""
    path = tmp_path / "fuzzed.gguf"

    def read(data: bytes) -> bool:
        path.unlink(missing_ok=True)  # a file that is still mapped must not be truncated
        path.write_bytes(data)
        try:
            spec = read_spec(path)
            json.dumps(describe(spec))
            for name in spec.tensors:
                spec.tensor(name).data.sum().item()  # touches every byte
        except MotleyError:
            return False
        return True

    assert read(SOUND)
    return read


@contextmanager
def little_memory() -> Iterator[None]:
    """The process may not grow by more than `HEADROOM`, whoever allocates: beyond it is a `MemoryError`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def n_readable(read: Reader, files: Iterable[bytes]) -> int:
    with little_memory():
        return sum(map(read, files))


def test_every_truncation_is_an_error(is_readable: Reader) -> None:
    assert n_readable(is_readable, (SOUND[:size] for size in range(len(SOUND)))) == 0


def test_flipped_bytes(is_readable: Reader) -> None:
    rng = random.Random(0)

    def flipped() -> bytes:
        data = bytearray(SOUND)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            data[rng.randrange(HEADER_BYTES)] ^= rng.randrange(1, 256)
        return bytes(data)

    # A changed number or letter goes unnoticed, a changed length does not.
    assert 0 < n_readable(is_readable, (flipped() for _ in range(3000))) < 3000


@pytest.mark.parametrize("number", [0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1])
def test_absurd_numbers_at_every_place(is_readable: Reader, number: int) -> None:
    raw = struct.pack("<Q", number)
    places = range(8, HEADER_BYTES - 8, 7)
    assert n_readable(is_readable, (SOUND[:at] + raw + SOUND[at + 8 :] for at in places)) < len(places)


def test_noise_after_a_sound_beginning(is_readable: Reader) -> None:
    rng = random.Random(1)
    files = (SOUND[: rng.randrange(24)] + rng.randbytes(2048) for _ in range(500))
    assert n_readable(is_readable, files) == 0


@settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cut=st.integers(0, HEADER_BYTES), drop=st.integers(0, 64), insert=st.binary(max_size=64))
def test_cut_and_spliced_headers(is_readable: Reader, cut: int, drop: int, insert: bytes) -> None:
    spliced = SOUND[:cut] + insert + SOUND[cut + drop :]
    assert is_readable(spliced) or spliced != SOUND


def test_a_count_that_the_file_could_almost_hold_allocates_little(tmp_path: Path) -> None:
    """A megabyte of zeros, read as an array of as many empty strings as fit."""
    path = tmp_path / "zeros.gguf"
    payload = bytes(2**20)
    count = len(payload) // 8
    words = key("a", GGUFValueType.ARRAY, array(GGUFValueType.STRING, count, payload))
    path.write_bytes(gguf_file([words], n_keys=2, alignment=1))
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match="metadata key 2 of 2"):
            read_spec(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(payload)
