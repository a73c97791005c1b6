"""How many kernels are compiled at once beside a model that needs the cores itself."""

from __future__ import annotations

import io
import json
import sys
from queue import SimpleQueue
from threading import Lock, Thread

import pytest

pytest.importorskip("triton")

from motley.backends.cuda.compile_worker import Limit, _read_lines, _tasks
from motley.backends.cuda.compiling import Job
from motley.backends.cuda.manifests import CompiledJobs


def test_beside_a_cpu_few_jobs_are_compiled_at_once_and_at_the_usual_priority() -> None:
    limit, lock = Limit(), Lock()
    limit.set(2)
    lines = [Job("a module", "a kernel", str(i)).message(is_urgent=i < 2) + "\n" for i in range(7)]
    tasks, taken = _tasks(lines, CompiledJobs(), lock, limit), SimpleQueue[tuple[int, str]]()

    def take_all() -> None:
        for task in tasks:
            taken.put(task)

    thread = Thread(target=take_all, daemon=True)
    thread.start()

    def next_numbers(n: int) -> list[int]:
        found = [taken.get(timeout=60) for _ in range(n)]
        assert all(json.loads(line)[3] for _, line in found)
        return [number for number, _ in found]

    assert next_numbers(4) == [0, 1, 2, 3]  # two urgent ones, and two others
    assert limit._under_way == {2, 3}
    assert taken.empty()
    limit.note_done(0)  # an urgent one makes no room
    limit.note_done(3)
    assert next_numbers(1) == [4]
    assert taken.empty()
    limit.set(None)  # a caller waits for all
    assert next_numbers(1) == [5]
    assert taken.get(timeout=60)[1] == lines[6]  # at a low priority
    thread.join(60)
    assert not thread.is_alive()


def test_the_input_ends_after_a_line_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's process was killed while it wrote. A compile process that waited for more would never end."""
    limit, lines = Limit(), SimpleQueue[str]()
    limit.set(1)
    monkeypatch.setattr(sys, "stdin", io.StringIO('[1]\n{"manifest": "/a/fol'))
    _read_lines(limit, lines)
    assert list(iter(lambda: lines.get(timeout=60), "")) == ["[1]\n"]
    assert limit._most is None
