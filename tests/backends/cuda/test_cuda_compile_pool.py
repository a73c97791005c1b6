"""Which kernels are compiled when: the queue of the compile process, and its workers, one of which may die."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from motley.backends.cuda.compile_worker import JobQueue
from motley.backends.cuda.compiling import Job

# Two workers that compile nothing. A job with "dies" in its data takes its worker down.
SCRIPT = """
import json, os, signal, sys
from motley.without_torch import stand_in

stand_in()
from motley.backends.cuda.compile_pool import Workers
from motley.backends.cuda.compile_worker import compile_all

def work(task):
    number, line = task
    if "dies" in line:
        os.kill(os.getpid(), signal.SIGKILL)
    return number, "a kernel", 0.0, None

workers = Workers(2, work)
print("ready", flush=True)
compile_all(workers, sys.stdin.fileno(), lambda result: print(json.dumps(result), flush=True))
workers.close()
"""


def job(data: object, *, is_urgent: bool = True) -> str:
    return Job("a module", "a kernel", str(data)).message(is_urgent=is_urgent) + "\n"


def taken(jobs: JobQueue) -> list[int]:
    """The numbers of all jobs that may be compiled now, at the usual priority."""
    found = []
    while (task := jobs.next()) is not None:
        assert json.loads(task[1])[3]
        found.append(task[0])
    return found


def test_beside_a_cpu_few_jobs_are_compiled_at_once_and_at_the_usual_priority() -> None:
    jobs = JobQueue()
    lines = [job(i, is_urgent=i < 2) for i in range(7)]
    jobs.read(('{"n_at_once": 2}\n' + "".join(lines)).encode())
    assert taken(jobs) == [0, 1, 2, 3]  # two urgent ones, and two others
    jobs.note((0, "a kernel", 0.1, None))  # an urgent one makes no room
    assert taken(jobs) == []
    jobs.note((3, "a kernel", 0.1, None))
    assert taken(jobs) == [4]
    jobs.read(b'{"n_at_once": null}\n')  # a caller waits for all
    low = [jobs.next(), jobs.next()]
    assert [each and each[1] for each in low] == [line.rstrip() for line in lines[5:]]
    assert jobs.next() is None


def test_the_input_ends_after_a_line_that_was_cut_off() -> None:
    """The model's process was killed while it wrote. A compile process that waited for more would never end."""
    jobs = JobQueue()
    text = job("first").encode()
    for data in (text[:9], text[9:] + b'{"n_at_once": 1}\n{"manifest": "/a/fol', b""):
        assert not jobs.is_complete
        jobs.read(data)
    assert jobs.is_complete
    assert taken(jobs) == [0]
    assert jobs._most is None


def test_a_manifest_is_written_when_its_jobs_are_done(tmp_path: Path) -> None:
    jobs, path = JobQueue(), tmp_path / "manifest.json"
    jobs.read((job(0) + job(1) + json.dumps({"manifest": str(path), "n_jobs": 2}) + "\n").encode())
    for number in taken(jobs):
        assert not path.exists()
        jobs.note((number, "a kernel", 0.1, None))
    assert path.exists()


def start() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_worker_that_dies_fails_its_own_job_and_no_other() -> None:
    """Otherwise a model whose compiler crashes, or is killed for want of memory, would be loaded without end."""
    process = start()
    said, _ = process.communicate(job(0) + job("dies") + job(2) + job("dies") + job(4))
    results = {number: error for number, _, _, error in map(json.loads, said.splitlines())}
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert [number for number, error in results.items() if error is None] == [0, 2, 4]
    assert results[1] == "its process has ended with signal 9"
    assert process.returncode == 0


def test_no_worker_is_left_when_the_compile_process_is_killed() -> None:
    process = start()
    process.kill()
    assert process.stdout is not None
    assert process.stdout.read() == ""  # workers that were left would keep it open
    process.communicate()
