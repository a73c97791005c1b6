"""A sound file reads back as what was written, lazily and without copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from raw_gguf import ARCHITECTURE, gguf_file, small_model, tensor, u32

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from motley.errors import GGUFError, ModelError
from motley.gguf import ModelSpec, read_spec


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_model())
    return read_spec(path)


def test_scalars(spec: ModelSpec) -> None:
    for name in ["UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64"]:
        assert spec.metadata.int(f"one.{name}") == 1
        assert spec.metadata.ints(f"some.{name}") == [0, 1, 1]
    for name in ("FLOAT32", "FLOAT64", "INT8"):
        assert spec.metadata.float(f"one.{name}") == 1.0
        assert spec.metadata.floats(f"some.{name}") == [0.0, 1.0, 1.0]
    assert spec.metadata.bool("one.BOOL") is True
    assert spec.metadata.bools("some.BOOL") == [False, True, True]
    assert spec.metadata.str("general.name") == "naïve 名前"
    assert spec.metadata.strs("some.words") == ["a", "", "ß"]
    assert spec.architecture == "llama"


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages"
)
def test_a_models_mapping_may_have_huge_pages(spec: ModelSpec) -> None:
    [path] = {part.path for part in spec.parts}
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    flags = next(line for line in lines[at:] if line.startswith("VmFlags"))
    assert "hg" in flags.split()


def test_arrays_of_arrays(spec: ModelSpec) -> None:
    words, empty = spec.metadata["some.arrays"]  # type: ignore[misc]
    assert words == ("a", "", "ß")
    assert len(empty) == 0


def test_shapes_are_row_major(spec: ModelSpec) -> None:
    assert {name: info.shape for name, info in spec.tensors.items()} == {
        "a": (2, 4),
        "b": (2, 1, 64),
        "c": (256,),
    }


def test_metadata_is_a_mapping(spec: ModelSpec) -> None:
    assert "general.name" in spec.metadata
    assert "absent" not in spec.metadata
    assert spec.metadata.get("absent") is None
    assert len(spec.metadata) == len(list(spec.metadata)) == 27


def test_defaults_stand_for_absent_keys_only(spec: ModelSpec) -> None:
    assert spec.metadata.int("absent", 7) == 7
    assert spec.metadata.str("absent", None) is None
    with pytest.raises(
        GGUFError, match=r"small\.gguf: the metadata key general\.name should be an integer.* a string"
    ):
        spec.metadata.int("general.name", 7)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("int", "one.BOOL"),
        ("int", "one.FLOAT32"),
        ("int", "some.INT32"),
        ("float", "one.BOOL"),
        ("bool", "one.UINT8"),
        ("str", "one.UINT8"),
        ("ints", "one.UINT8"),
        ("ints", "some.FLOAT32"),
        ("ints", "some.BOOL"),
        ("floats", "some.words"),
        ("bools", "some.UINT8"),
        ("strs", "some.INT8"),
        ("strs", "some.arrays"),
    ],
)
def test_a_value_of_another_type_names_file_and_key(spec: ModelSpec, method: str, key: str) -> None:
    with pytest.raises(GGUFError, match=rf"small\.gguf.*{key} should be an? .*, but it is an? "):
        getattr(spec.metadata, method)(key)


def test_a_missing_key_names_file_and_key(spec: ModelSpec) -> None:
    for access in (spec.metadata.int, spec.metadata.strs, spec.metadata.__getitem__):
        with pytest.raises(GGUFError, match=r"small\.gguf.* absent\.key is missing"):
            access("absent.key")


def test_a_file_without_architecture_says_so_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file([u32("a", 1)]))
    with pytest.raises(GGUFError, match=r"general\.architecture is missing"):
        _ = read_spec(path).architecture


def test_a_missing_tensor_is_named(spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"small\.gguf: the tensor blk\.7\.x is missing"):
        spec.tensor("blk.7.x")


def test_a_type_that_cannot_be_computed_with_is_listed_but_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file(tensors=[tensor("a", (256,), GGMLQuantizationType.IQ2_XXS)], data=bytes(66)))
    spec = read_spec(path)
    assert (spec.tensors["a"].type_name, spec.tensors["a"].nbytes) == ("IQ2_XXS", 66)
    with pytest.raises(ModelError, match=r"tensor 'a' is stored as IQ2_XXS.*supported: F32, F16"):
        spec.tensor("a")


def test_tensors_are_views_of_the_file_that_cannot_change_it(spec: ModelSpec) -> None:
    before = spec.path.read_bytes()
    values = spec.tensor("a").unpack()
    assert values.data_ptr() == spec.tensor("a").data.data_ptr()
    values.fill_(3.0)
    assert torch.equal(spec.tensor("a").unpack(), values)
    assert spec.path.read_bytes() == before


def test_tensors_outlive_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file(tensors=[tensor("a", (4,))], data=np.arange(4, dtype=np.float32).tobytes()))
    packed = read_spec(path).tensor("a")
    path.unlink()
    assert packed.unpack().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    path = tmp_path / "x.gguf"
    keys = [ARCHITECTURE, u32("general.alignment", alignment)]
    tensors = [tensor("a", (2,)), tensor("b", (2,), offset=alignment)]
    data = np.float32([1, 2]).tobytes().ljust(alignment) + np.float32([3, 4]).tobytes()
    path.write_bytes(gguf_file(keys, tensors, data, version=version, alignment=alignment))
    spec = read_spec(path)
    assert spec.tensor("b").unpack().tolist() == [3, 4]
    assert spec.parts[0].version == version


def test_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("plain", values)
    quantized = gguf.quants.quantize(values, GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantized", quantized, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = read_spec(path)
    assert spec.metadata.int("llama.context_length") == 77
    assert spec.metadata.strs("tokenizer.ggml.tokens") == ["a", "b"]
    assert np.array_equal(spec.tensor("plain").unpack().numpy(), values)
    assert np.array_equal(spec.tensor("quantized").data.numpy(), quantized)


@pytest.mark.parametrize(
    "name", ["data/models/stories260K/stories260K.gguf", "golden/llama/model-Q4_K_M.gguf"]
)
def test_agrees_with_the_reader_of_the_gguf_package(shared: Path, name: str) -> None:
    path = shared / name
    spec, reader = read_spec(path), GGUFReader(path)
    keys = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(spec.metadata) == set(keys)
    for key, field in keys.items():
        value = spec.metadata[key]
        assert (list(value) if isinstance(value, tuple | np.ndarray) else value) == field.contents()
    assert list(spec.tensors) == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        assert np.array_equal(
            spec.tensor(theirs.name).data.numpy().ravel(), theirs.data.view(np.uint8).ravel()
        )
