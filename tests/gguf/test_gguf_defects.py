"""Every defect is a `GGUFError` that names the file, the key or tensor, and what is wrong."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType, GGUFValueType
from raw_gguf import ARCHITECTURE, array, gguf_file, key, string, tensor, text, u32, u64

from motley.errors import GGUFError
from motley.gguf import read_spec

ARRAY = GGUFValueType.ARRAY
HUGE = 2**63


def nested(depth: int) -> bytes:
    return array(GGUFValueType.UINT8, 0) if depth == 1 else array(ARRAY, 1, nested(depth - 1))


def with_key(*keys: bytes) -> bytes:
    return gguf_file([ARCHITECTURE, *keys])


def with_tensors(*tensors: bytes, data: int = 64) -> bytes:
    return gguf_file(tensors=tensors, data=bytes(data))


DEFECTS = {
    "empty": (b"", "the file is empty"),
    "three bytes": (b"GGU", "the file ends at byte 3"),
    "magic": (gguf_file(magic=b"GGML"), r"starts with b'GGML'.*not GGUF"),
    "version 1": (gguf_file(version=1), "version 1 is not supported"),
    "version 4": (gguf_file(version=4), "version 4 is not supported"),
    "big endian": (gguf_file(version=3 << 24), "big endian"),
    "many tensors": (gguf_file(n_tensors=HUGE), r"9,223,372,036,854,775,808 tensors cannot fit"),
    "many keys": (gguf_file(n_keys=2**64 - 1), "metadata keys cannot fit"),
    "keys beyond the end": (gguf_file(n_keys=2) + bytes(8), "metadata key 2 of 2"),
    "empty key": (with_key(u32("", 1)), "metadata key 2 of 2: a key has 1 to 65,535 bytes, not 0"),
    "long key": (with_key(u32("k" * 70_000, 1)), "bytes, not 70,000"),
    "key not UTF-8": (with_key(key(b"\xff\xfe", 4, bytes(4))), r"metadata key 2 of 2.*not UTF-8"),
    "key twice": (with_key(u32("a", 1), u32("a", 2)), "metadata key 'a': is there twice"),
    "value type": (with_key(key("a", 99, bytes(8))), "metadata key 'a': the value type 99 is unknown"),
    "string length": (
        with_key(key("a", GGUFValueType.STRING, struct.pack("<Q", HUGE))),
        "metadata key 'a': the file ends at byte .* a string of 9,223,372,036,854,775,808 bytes",
    ),
    "string not UTF-8": (
        with_key(text("a", b"ok\xc3")),
        r"metadata key 'a': the string at byte .* not UTF-8",
    ),
    "bool": (with_key(key("a", GGUFValueType.BOOL, b"\x02")), "metadata key 'a': a boolean is 0 or 1, not 2"),
    "bools": (
        with_key(key("a", ARRAY, array(GGUFValueType.BOOL, 2, b"\x01\xff"))),
        "metadata key 'a': a boolean is 0 or 1, not 255",
    ),
    "array type": (with_key(key("a", ARRAY, array(13, 1, bytes(8)))), "'a': the value type 13 is unknown"),
    "array count": (
        with_key(key("a", ARRAY, array(GGUFValueType.UINT8, HUGE))),
        "'a': .* numbers cannot fit",
    ),
    "array too long": (
        with_key(key("a", ARRAY, array(GGUFValueType.UINT64, 9, bytes(64)))),
        "'a': the file ends at byte .* 72 bytes",
    ),
    "string count": (
        with_key(key("a", ARRAY, array(GGUFValueType.STRING, HUGE))),
        "'a': .* strings cannot fit",
    ),
    "string in array": (
        with_key(key("a", ARRAY, array(GGUFValueType.STRING, 2, string("x") + b"\xff" * 8))),
        "metadata key 'a': the file ends",
    ),
    "array count in array": (with_key(key("a", ARRAY, array(ARRAY, HUGE))), "'a': .* arrays cannot fit"),
    "deep nesting": (with_key(key("a", ARRAY, nested(5))), "'a': arrays are nested more than 4 deep"),
    "alignment zero": (with_key(u32("general.alignment", 0)), r"general\.alignment is 0; .* power of two"),
    "alignment odd": (with_key(u32("general.alignment", 24)), r"general\.alignment is 24"),
    "alignment huge": (
        with_key(u64("general.alignment", HUGE)),
        r"general\.alignment is 9223372036854775808",
    ),
    "alignment text": (with_key(text("general.alignment", "32")), r"general\.alignment should be an integer"),
    "split count text": (with_key(text("split.count", "2")), r"split\.count should be an integer"),
    "tensor name": (with_tensors(tensor("", (4,))), "tensor 1 of 1: has no name"),
    "tensor name not UTF-8": (
        gguf_file(tensors=[string(b"\xff") + struct.pack("<IQIQ", 1, 4, 0, 0)], data=bytes(16)),
        "tensor 1 of 1: the string at byte .* not UTF-8",
    ),
    "tensor twice": (with_tensors(tensor("a"), tensor("a", offset=32)), "tensor 'a': is there twice"),
    "no dimensions": (with_tensors(tensor("a", ()), data=64), "tensor 'a': has 0 dimensions"),
    "five dimensions": (with_tensors(tensor("a", (1, 1, 1, 1, 1))), "tensor 'a': has 5 dimensions"),
    "empty dimension": (with_tensors(tensor("a", (4, 0))), r"tensor 'a': has an empty dimension.*\(0, 4\)"),
    "overflowing dimensions": (
        with_tensors(tensor("a", (2**33, 2**33, 2**33, 2**33))),
        "tensor 'a': shape .* would end at byte",
    ),
    "unknown tensor type": (with_tensors(tensor("a", (32,), 4)), "tensor 'a': the tensor type 4 is unknown"),
    "row of half a block": (
        with_tensors(tensor("a", (48, 2), GGMLQuantizationType.Q8_0)),
        "tensor 'a': a row of 48 values is not whole Q8_0 blocks of 32",
    ),
    "misaligned": (with_tensors(tensor("a", offset=16)), "tensor 'a': its offset 16 is not a multiple .* 32"),
    "out of the file": (with_tensors(tensor("a", offset=64)), "tensor 'a': .* would end at byte"),
    "far out of the file": (with_tensors(tensor("a", offset=2**64 - 32)), "tensor 'a': .* would end at byte"),
    "one byte short": (with_tensors(tensor("a", (4,)), data=15), "tensor 'a': .* would end at byte"),
    "overlap": (
        with_tensors(tensor("a", (16,)), tensor("b", (4,), offset=32)),
        "the tensors 'a' and 'b' overlap",
    ),
    "same place": (with_tensors(tensor("a"), tensor("b")), "the tensors 'a' and 'b' overlap"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named(tmp_path: Path, name: str) -> None:
    data, message = DEFECTS[name]
    path = tmp_path / "defective.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=rf"defective\.gguf: .*{message}"):
        read_spec(path)


def test_some_nesting_is_not_a_defect(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file([ARCHITECTURE, key("a", ARRAY, nested(4))]))
    assert "a" in read_spec(path).metadata


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"absent\.gguf: there is no such file"):
        read_spec(tmp_path / "absent.gguf")
    with pytest.raises(GGUFError, match=r"there is no such file \(~ means nothing here"):
        read_spec("~/absent.gguf")
    with pytest.raises(GGUFError, match="this is a folder"):
        read_spec(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GGUFError, match="pipe: this is a pipe"):
        read_spec(tmp_path / "pipe")


def test_a_download_that_broke_off_is_to_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    for data in (b"", gguf_file(n_tensors=HUGE), gguf_file([ARCHITECTURE])[:40]):
        path.write_bytes(data)
        with pytest.raises(GGUFError) as caught:
            read_spec(path)
        assert "download it again" in str(caught.value.hint)
