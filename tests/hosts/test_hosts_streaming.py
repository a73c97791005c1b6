"""A worker without the model file gets its parts of it from rank 0."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley import LLM
from motley.gguf import read_spec
from motley.runtime.hosts import opening, streaming
from motley.runtime.hosts.protocol import ProtocolError
from motley.runtime.hosts.serving import WorkerServer
from motley.runtime.hosts.streaming import ModelFiles, Piece, StreamedModel

OPTIONS: dict[str, Any] = {"n_ctx": 128, "n_parallel": 2, "n_threads": 1}
TOKENS: list[int] = np.random.default_rng(5).integers(1, 250, 30).tolist()


@contextmanager
def worker_without_models(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a worker that finds no model files."""
    monkeypatch.setattr(opening, "_find_model", lambda path, models: None)
    server = WorkerServer(cache=cache, n_threads=1)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.address
    finally:
        server.close()
        thread.join(60)


def pieces_of(cache: Path) -> list[Piece]:
    (journal,) = cache.glob("*/journal")
    return [Piece(*json.loads(line)[:-1]) for line in journal.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_only_its_own_parts_are_sent_and_only_once(
    mode: str, random_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | {"split_mode": mode, "tensor_split": (3, 1)}
    with LLM(random_llama, devices="cpu,cpu", **options) as llm:
        expected = llm.logits(TOKENS)
    with worker_without_models(tmp_path, monkeypatch) as address:
        for _ in range(2):
            with LLM(random_llama, devices=f"cpu,cpu@{address}", **options) as llm:
                assert np.array_equal(llm.logits(TOKENS), expected)
    pieces = pieces_of(tmp_path)
    assert len(set(pieces)) == len(pieces)
    spec = read_spec(random_llama)
    matrices = [
        info for info in spec.tensors.values() if info.name.startswith("blk.") and len(info.shape) > 1
    ]
    n_weights = sum(info.nbytes for info in matrices)
    starts = min(info.offset for info in matrices), max(info.offset + info.nbytes for info in matrices)
    n_sent = sum(piece.n_bytes for piece in pieces if starts[0] <= piece.offset < starts[1])
    assert 0 < n_sent < n_weights * 0.6  # about a quarter, and what every device has


def test_a_broken_transfer_is_continued_and_damage_is_repaired(
    random_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", 4096)
    options = OPTIONS | {"split_mode": "tensor"}
    with LLM(random_llama, devices="cpu,cpu", **options) as llm:
        expected = llm.logits(TOKENS)
    with worker_without_models(tmp_path, monkeypatch) as address:
        names = f"cpu,cpu@{address}"
        with LLM(random_llama, devices=names, **options) as llm:
            assert np.array_equal(llm.logits(TOKENS), expected)
        pieces = pieces_of(tmp_path)
        (journal,) = tmp_path.glob("*/journal")
        kept = journal.read_text().splitlines(keepends=True)[:-20]
        journal.write_text("".join(kept) + '[0, 17, "torn')  # as after a loss of power
        damaged = pieces[len(pieces) // 2]
        with (journal.parent / random_llama.name).open("r+b") as file:
            file.seek(damaged.offset)
            (byte,) = file.read(1)
            file.seek(damaged.offset)
            file.write(bytes([255 - byte]))
        with LLM(random_llama, devices=names, **options) as llm:
            assert np.array_equal(llm.logits(TOKENS), expected)
        lines = journal.read_text().splitlines()
        again = [json.loads(line)[:-1] for line in lines[len(kept) + 1 :]]
        assert sorted(again) == sorted([list(damaged), *map(list, pieces[-20:])])


@pytest.mark.parametrize(
    "piece",
    [
        Piece(1, 0, 1, 1, 1),
        Piece(0, 0, 0, 1, 1),
        Piece(0, 0, 1, 1, 0),
        Piece(0, 1 << 60, 1, 1, 1),
        Piece(0, 0, 1 << 21, 1 << 21, 1),
        Piece(0, 0, 1, 1 << 40, 1 << 20),
        Piece(0, 0, 16, 8, 4),
    ],
)
def test_rank_0_sends_nothing_but_the_model(piece: Piece, random_llama: Path) -> None:
    with pytest.raises(ProtocolError):
        ModelFiles(random_llama).answer(streaming._PIECE.pack(*piece))
    with pytest.raises(ProtocolError):
        ModelFiles(random_llama).answer(b"123")


@pytest.mark.parametrize("name", ["../a.gguf", "journal", "", "/etc/a.gguf", "a\0.gguf"])
def test_files_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    answer = json.dumps({"files": [{"name": name, "size": 10, "n_head": 5}]}).encode()
    with pytest.raises(ProtocolError):
        StreamedModel(tmp_path / "parts", lambda request: None, lambda: answer, lambda done, total: None)
