"""Manifests: written when all kernels before them are compiled, and never if one has failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs

from motley.backends.cuda.manifests import Compiled, CompiledJobs, Manifest, write_manifest

DONE, FAILED = Compiled("_matmul", 0.8), Compiled("_matmul", 0.1, "no registers")


def test_a_manifest_is_written_when_its_jobs_are_done_in_any_order(tmp_path: Path) -> None:
    jobs, few, everything = CompiledJobs(), tmp_path / "few.json", tmp_path / "all.json"
    jobs.expect(2, few)
    jobs.expect(3, everything)
    jobs.note(1, DONE)
    jobs.note(2, DONE)
    assert not few.exists()
    jobs.note(0, DONE)
    assert few.exists()
    assert everything.exists()


def test_a_manifest_may_come_after_its_jobs_and_without_any(tmp_path: Path) -> None:
    jobs = CompiledJobs()
    jobs.expect(0, tmp_path / "nothing.json")
    assert (tmp_path / "nothing.json").exists()
    jobs.note(0, DONE)
    jobs.expect(1, tmp_path / "late.json")
    assert (tmp_path / "late.json").exists()


def test_a_failed_job_leaves_the_manifests_after_it_unwritten(tmp_path: Path) -> None:
    jobs = CompiledJobs()
    jobs.note(0, DONE)
    jobs.note(1, FAILED)
    jobs.expect(1, tmp_path / "before.json")
    jobs.expect(2, tmp_path / "after.json")
    assert [path.name for path in tmp_path.iterdir()] == ["before.json"]


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return Manifest("a model")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b'{"kernels": 3}',
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * (2**24 + 1),
    ],
    ids=range(10),
)
def test_a_damaged_manifest_is_as_good_as_none(manifest: Manifest, content: bytes) -> None:
    manifest.path.write_bytes(content)
    assert not manifest.exists
    manifest.write([DONE])
    assert manifest.exists
    assert (
        manifest.path.stat().st_mode & 0o444 == 0o666 & ~_umask() & 0o444
    )  # an image's other users read it, too


def test_something_else_of_that_name_is_not_read(manifest: Manifest) -> None:
    os.mkfifo(manifest.path)
    assert not manifest.exists
    manifest.path.unlink()
    manifest.path.mkdir()
    assert not manifest.exists
    manifest.write([DONE])  # not possible, and no error
    assert not manifest.exists


def test_a_full_disk_leaves_nothing_behind(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("json.dump", fail)
    manifest.write([DONE])
    assert not list(manifest.path.parent.iterdir())


def test_manifests_of_processes_with_the_same_id_do_not_mix(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of containers that share the folder: each writes a file of its own first."""
    names: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "replace", lambda old, new: (names.append(old), replace(old, new)))
    for _ in range(2):
        write_manifest(manifest.path, [DONE])
    assert len(set(names)) == 2
    assert list(manifest.path.parent.iterdir()) == [manifest.path]
