"""Models in several files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from raw_gguf import ARCHITECTURE, gguf_file, tensor, u32

from motley.errors import GGUFError
from motley.gguf import read_spec


def write_parts(
    folder: Path, n_parts: int = 3, *, tensors_count: int | None = None, name: str = "model"
) -> list[Path]:
    """One tensor in each part: t0 holds 0.0, t1 holds 1.0 ..."""
    paths = []
    for index in range(n_parts):
        split = [
            u32("split.no", index),
            u32("split.count", n_parts),
            u32("split.tensors.count", n_parts if tensors_count is None else tensors_count),
        ]
        keys = [ARCHITECTURE, u32("llama.block_count", 5), *split] if index == 0 else split
        path = folder / f"{name}-{index + 1:05}-of-{n_parts:05}.gguf"
        path.write_bytes(gguf_file(keys, [tensor(f"t{index}", (1,))], np.float32(index).tobytes()))
        paths.append(path)
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole_model(tmp_path: Path, opened: int) -> None:
    paths = write_parts(tmp_path)
    spec = read_spec(paths[opened])
    assert spec.path == paths[0]
    assert spec.metadata.int("llama.block_count") == 5
    assert [spec.tensor(f"t{i}").unpack().item() for i in range(3)] == [0.0, 1.0, 2.0]
    assert [info.part for info in spec.tensors.values()] == [0, 1, 2]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(GGUFError, match=r"missing: model-00002-of-00003\.gguf"):
        read_spec(paths[0])


def test_many_missing_parts_are_not_all_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 20)
    for path in paths[1:]:
        path.unlink()
    with pytest.raises(GGUFError, match=r"model-00006-of-00020\.gguf and 14 more"):
        read_spec(paths[0])


def test_a_part_under_another_name_says_how_it_should_be_called(tmp_path: Path) -> None:
    path = write_parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=r"one of 3 parts.*NAME-00001-of-00003\.gguf"):
        read_spec(path)


def test_a_name_that_contradicts_the_file(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    renamed = paths[0].rename(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(GGUFError, match=r"name says 2 parts.*split\.count says 3"):
        read_spec(renamed)


def test_parts_in_the_wrong_order(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    first, second = paths[0].read_bytes(), paths[1].read_bytes()
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(GGUFError, match=r"model-00001-of-00003\.gguf: split\.no is 1, .* 0"):
        read_spec(paths[2])


def test_a_part_of_another_split(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    write_parts(tmp_path, 2, name="other")[1].rename(paths[1])
    with pytest.raises(GGUFError, match=r"00002-of-00003\.gguf: split\.count is 2, .* 3"):
        read_spec(paths[0])


def test_a_part_that_is_not_one(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[2].write_bytes(gguf_file())
    with pytest.raises(GGUFError, match=r"00003-of-00003\.gguf: the metadata key split\.no is missing"):
        read_spec(paths[0])


def test_tensors_that_do_not_add_up(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"split\.tensors\.count is 9, but the parts hold 3"):
        read_spec(write_parts(tmp_path, tensors_count=9)[0])


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    keys = [u32("split.no", 2), u32("split.count", 3)]
    paths[2].write_bytes(gguf_file(keys, [tensor("t0", (1,))], bytes(4)))
    with pytest.raises(
        GGUFError, match=r"00003-of-00003\.gguf: the tensor 't0' is in .*00001-of-00003\.gguf too"
    ):
        read_spec(paths[0])


def test_a_whole_model_may_be_called_a_part(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(gguf_file())
    assert read_spec(path).architecture == "llama"


def test_an_absurd_number_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(gguf_file([ARCHITECTURE, u32("split.count", 2**32 - 1)]))
    with pytest.raises(GGUFError, match=r"split\.count says 4294967295"):
        read_spec(path)
