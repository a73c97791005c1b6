"""Manifests: written when all kernels before them are compiled, and never if one has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from motley.backends.cuda.manifests import Compiled, Ledger

DONE, FAILED = Compiled("_matmul", 0.8), Compiled("_matmul", 0.1, "no registers")


def test_a_manifest_is_written_when_its_jobs_are_done_in_any_order(tmp_path: Path) -> None:
    ledger, few, everything = Ledger(), tmp_path / "few.json", tmp_path / "all.json"
    ledger.expect(2, few)
    ledger.expect(3, everything)
    ledger.note(1, DONE)
    ledger.note(2, DONE)
    assert not few.exists()
    ledger.note(0, DONE)
    assert few.exists()
    assert everything.exists()


def test_a_manifest_may_come_after_its_jobs_and_without_any(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.expect(0, tmp_path / "nothing.json")
    assert (tmp_path / "nothing.json").exists()
    ledger.note(0, DONE)
    ledger.expect(1, tmp_path / "late.json")
    assert (tmp_path / "late.json").exists()


def test_a_failed_job_leaves_the_manifests_after_it_unwritten(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.note(0, DONE)
    ledger.note(1, FAILED)
    ledger.expect(1, tmp_path / "before.json")
    ledger.expect(2, tmp_path / "after.json")
    assert [path.name for path in tmp_path.iterdir()] == ["before.json"]
