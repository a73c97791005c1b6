"""Saved caches: the same bytes under any crew, and nothing is taken from a file that is not what it says."""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley import LLM, MotleyError
from motley.errors import CacheError, ConfigError
from random_models import LLAMA

ALONE: dict[str, Any] = {}
CREWS: list[dict[str, Any]] = [
    {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
    {"devices": "cpu,cpu,cpu,cpu", "split_mode": "tensor"},  # each of two KV heads is stored twice
    {"devices": "cpu,cpu", "split_mode": "layer"},
]
TYPES = {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}


@pytest.fixture(scope="module")
def path(random_llama: Path) -> Path:
    return random_llama


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return random_tokens(100)


def random_tokens(n: int) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(1, 250, n).tolist()
    return ids


def open_llm(path: Path, **options: Any) -> LLM:
    plain = {"n_ctx": 256, "kv_block_size": 16, "backend": "reference", "n_parallel": 2, "n_batch": 64}
    return LLM(path, **(plain | options))


def save(path: Path, file: Path, tokens: list[int], **options: Any) -> tuple[int, ...]:
    """Save a session; returns what the same model answers next."""
    with open_llm(path, **options) as llm:
        assert llm.save_session(file, tokens) == file.stat().st_size
        return answer(llm, [*tokens, 7])[0]


def answer(llm: LLM, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """Tokens of a greedy answer, and how many of the prompt's were in the cache."""
    done = llm.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)
    llm._call(llm._loaded.cache.check_integrity)
    return done.tokens, done.timings.cached_tokens


@pytest.fixture(scope="module")
def saved(path: Path, tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sessions") / "one.kv"
    save(path, file, tokens, **TYPES)
    return file


@pytest.mark.parametrize("crew", [ALONE, *CREWS], ids=["alone", "3:1", "repeated heads", "layers"])
def test_a_session_goes_on_under_another_crew(path: Path, tokens: list[int], saved: Path, crew: Any) -> None:
    with open_llm(path, **TYPES) as llm:
        expected, _ = answer(llm, [*tokens, 7])
    with open_llm(path, **TYPES, **crew) as llm:
        assert llm.load_session(saved) == tokens
        assert answer(llm, [*tokens, 7]) == (expected, 100)


@pytest.mark.parametrize("crew", CREWS, ids=["3:1", "repeated heads", "layers"])
def test_every_crew_writes_the_same_file(
    path: Path, tokens: list[int], tmp_path: Path, crew: dict[str, Any]
) -> None:
    """With f32 K/V that differ by rounding at most, and the same bytes of everything else."""
    f32 = {"cache_type_k": "f32", "cache_type_v": "f32"}
    save(path, tmp_path / "alone", tokens, **f32)
    save(path, tmp_path / "crew", tokens, **f32, **crew)
    alone, crewed = ((tmp_path / name).read_bytes() for name in ("alone", "crew"))
    n_header = 16 + struct.unpack_from("<8sII", alone)[2] + 4 * len(tokens)
    assert alone[:n_header] == crewed[:n_header]
    a, b = (np.frombuffer(data[n_header:-32], np.float32) for data in (alone, crewed))
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("kind", ["f16", "q5_1", "iq4_nl"])
def test_types_and_block_sizes(path: Path, tokens: list[int], tmp_path: Path, kind: str) -> None:
    types = {"cache_type_k": kind, "cache_type_v": kind}
    expected = save(path, tmp_path / "s", tokens[:75], **types)
    with open_llm(path, **types, kv_block_size=64) as llm:
        llm.load_session(tmp_path / "s")
        assert answer(llm, [*tokens[:75], 7]) == (expected, 75)


def test_windows_are_saved_as_far_as_they_see(random_gemma3: Path, tmp_path: Path) -> None:
    path, tokens = random_gemma3, random_tokens(150)
    expected = save(path, tmp_path / "s", tokens)
    per_token = 2 * 64 * 2 * 2  # of one layer: heads, dim, K and V, f16
    assert (tmp_path / "s").stat().st_size < per_token * (150 + 5 * 64)
    with open_llm(path, **CREWS[0]) as llm:
        llm.load_session(tmp_path / "s")
        assert answer(llm, [*tokens, 7]) == (expected, 150)
    with open_llm(path, kv_block_size=8) as llm:
        llm.load_session(tmp_path / "s")
        assert answer(llm, tokens)[1] == 149
    with (
        open_llm(path, kv_block_size=128) as llm,
        pytest.raises(CacheError, match="blocks of 128 needs them"),
    ):
        llm.load_session(tmp_path / "s")


def test_saving_after_an_answer_computes_only_its_last_token(
    path: Path, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(path) as llm:
        done = llm.generate(tokens, max_tokens=16, temperature=0, ignore_eos=True)
        run, batches = llm._loaded.runner.run, []
        monkeypatch.setattr(
            llm._loaded.runner, "run", lambda b, *rest: batches.append(b.shape.n_tokens) or run(b, *rest)
        )
        llm.save_session(tmp_path / "s", [*tokens, *done.tokens])
        assert batches == [1]


def test_a_text_can_be_saved(path: Path, tmp_path: Path) -> None:
    with open_llm(path) as llm:
        llm.save_session(tmp_path / "s", "hello")
        assert llm.load_session(tmp_path / "s") == llm.tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type_k": "f16"}, "cache type k 'q8_0', but here it is 'f16'"),
        ({"kv_rotation": False}, "k rotation 64, but here it is 0"),
        ({"n_ctx": 64}, "100 tokens do not fit into a context of 64"),
        ({"kv_cache_tokens": 96}, "100 tokens need 7 blocks"),
    ],
)
def test_a_session_for_another_cache_is_refused(
    path: Path, saved: Path, options: dict[str, Any], message: str
) -> None:
    with open_llm(path, **(TYPES | options)) as llm:
        with pytest.raises(CacheError, match=message):
            llm.load_session(saved)
        assert llm.kv_stats().use.groups[0].n_cached == 0


def test_a_session_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    other = LLAMA.write(tmp_path / "other.gguf", seed=1)
    with (
        open_llm(other, **TYPES) as llm,
        pytest.raises(CacheError, match="saved with model"),
    ):
        llm.load_session(saved)


def test_without_a_prefix_cache_there_is_nowhere_to_load_to(path: Path, saved: Path) -> None:
    with (
        open_llm(path, **TYPES, prefix_cache=False) as llm,
        pytest.raises(ConfigError, match="prefix cache, which is off"),
    ):
        llm.load_session(saved)


def sealed(data: bytes) -> bytes:
    """With a right checksum, as somebody who means harm would write it."""
    return data + blake2b(data, digest_size=32).digest()


def with_header(data: bytes, **changes: Any) -> bytes:
    magic, version, n_header = struct.unpack_from("<8sII", data)
    header = json.loads(data[16 : 16 + n_header]) | changes
    text = json.dumps(header).encode()
    return sealed(struct.pack("<8sII", magic, version, len(text)) + text + data[16 + n_header : -32])


def test_damaged_and_foreign_files_are_refused(path: Path, saved: Path, tmp_path: Path) -> None:
    good = saved.read_bytes()
    n_header = struct.unpack_from("<8sII", good)[2]
    first_token = 16 + n_header
    bad: dict[str, bytes] = {
        "empty": b"",
        "text": b"once upon a time" * 100,
        "header only": good[:100],
        "truncated": good[:-1000],
        "one bit": good[:5000] + bytes([good[5000] ^ 1]) + good[5001:],
        "checksum": good[:-1] + bytes([good[-1] ^ 1]),
        "version": sealed(good[:8] + struct.pack("<I", 2) + good[12:-32]),
        "long header": sealed(good[:12] + struct.pack("<I", 1 << 31) + good[16:-32]),
        "no json": sealed(good[:16] + b"x" * n_header + good[16 + n_header : -32]),
        "deep json": sealed(struct.pack("<8sII", good[:8], 1, 60000) + b"[" * 60000 + good[first_token:-32]),
        "a list": sealed(struct.pack("<8sII", good[:8], 1, 2) + b"[]" + good[first_token:-32]),
        "more tokens": with_header(good, n_tokens=120),
        "fewer tokens": with_header(good, n_tokens=90),
        "very many tokens": with_header(good, n_tokens=1 << 40),
        "no tokens": with_header(good, n_tokens=0),
        "odd firsts": with_header(good, firsts=[-1, 0, 0, 0]),
        "fewer firsts": with_header(good, firsts=[0]),
        "later firsts": with_header(good, firsts=[50, 0, 0, 0]),
        "foreign token": sealed(good[:first_token] + struct.pack("<I", 99999) + good[first_token + 4 : -32]),
        "too much": sealed(good[:-32] + b"more"),
        "no model": with_header(good, model=None),
    }
    with open_llm(path, **TYPES) as llm:
        for name, data in bad.items():
            file = tmp_path / name
            file.write_bytes(data)
            with pytest.raises(MotleyError, match=str(file)):
                llm.load_session(file)
            llm._call(llm._loaded.cache.check_integrity)
            assert llm.kv_stats().use.groups[0].n_cached == 0, name
            assert llm.kv_stats().n_blocks_used == 0, name
        with pytest.raises(CacheError, match="cannot be read"):
            llm.load_session(tmp_path / "absent")
        with pytest.raises(CacheError, match="cannot be written"):
            llm.save_session(tmp_path / "absent" / "s", [1, 2])
        llm.load_session(saved)
