"""Manifests: written when all kernels before them are compiled, and never if one has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from motley.backends.cuda.manifests import Compiled, CompiledJobs

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
