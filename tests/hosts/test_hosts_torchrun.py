"""torchrun starts the processes of a crew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from motley.cli import torchrun


@pytest.mark.slow
def test_rank_0_answers_with_the_devices_of_all_ranks(bundled: Path) -> None:
    flags = ["-p", "Once upon a time", "-n", "16", "--temp", "0", "-c", "64", "-sm", "tensor"]
    command = ["-m", "motley", "run", str(bundled), *flags]
    together = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command])
    assert "torchrun: cpu,cpu@" in together.stderr
    assert together.stdout == run([*command, "--device", "cpu,cpu"]).stdout


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_one_process_alone_is_no_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torchrun.is_active()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        assert not torchrun.is_active()
        monkeypatch.setenv(name, value)
    assert torchrun.is_worker()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not torchrun.is_active()


def test_a_group_of_each_rank_s_devices_has_the_rank_s_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def set(self, key: str, value: str) -> None: ...

        def get(self, key: str) -> bytes:
            return b"cpu 10.0.0.2:7"

    monkeypatch.setattr(torchrun, "_store", Store)
    monkeypatch.setenv("WORLD_SIZE", "2")
    crew = torchrun.gather("(cuda:0,cuda:1),cpu")
    assert crew.devices == "(cuda:0,cuda:1),cpu,(cuda:0,cuda:1)@10.0.0.2:7,cpu@10.0.0.2:7"
    crew.secret_file.unlink()
