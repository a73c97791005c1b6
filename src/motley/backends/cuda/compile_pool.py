"""Processes that each do one task at a time, for the process that compiles kernels (`compile_worker`).

Python's own pool never answers for a task whose process dies (a compiler that crashes, a system without memory), and a
model that is being loaded would wait without end. Here such a task ends with an error, and another process takes the
place of the one that died. The caller has no threads: only then is it safe to fork at any time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_fork = multiprocessing.get_context("fork")


class Died(NamedTuple):
    """In place of a result: the process that did the task has ended."""

    exit_code: int | None

    def __str__(self) -> str:
        code = self.exit_code or 0
        return f"its process has ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


class Workers(Generic[Task, Result]):
    """`n` processes that are forked from this one: what it has imported is there at once."""

    def __init__(self, n: int, work: Callable[[Task], Result]) -> None:
        self._work = work
        self._processes: dict[Connection, Any] = {}
        self._tasks: dict[Connection, Task] = {}  # of those that are at work
        for _ in range(n):
            self._start()

    @property
    def n_idle(self) -> int:
        return len(self._processes) - len(self._tasks)

    @property
    def n_busy(self) -> int:
        return len(self._tasks)

    def give(self, task: Task) -> None:
        """Have a task done by an idle process."""
        line = next(each for each in self._processes if each not in self._tasks)
        if not self._processes[line].is_alive():
            line = self._replace(line)
        self._tasks[line] = task
        with suppress(OSError):  # it has died; `wait` says so
            line.send(task)

    def wait(self, others: Sequence[int] = ()) -> tuple[list[tuple[Task, Result | Died]], list[int]]:
        """Wait until a task is done, or until one of the other file descriptors can be read. Returns the tasks that are
        done, with their results, and these descriptors.
        """
        done: list[tuple[Task, Result | Died]] = []
        readable: list[int] = []
        for each in wait([*self._tasks, *others]):
            if isinstance(each, Connection):
                result = self._receive(each)
                done.append((self._tasks.pop(each), result))
                if isinstance(result, Died):
                    self._replace(each)
            else:
                assert isinstance(each, int)
                readable.append(each)
        return done, readable

    def close(self) -> None:
        """No further tasks: the processes end."""
        for line, process in self._processes.items():
            line.close()
            process.join()
        self._processes.clear()

    def _receive(self, line: Connection) -> Result | Died:
        try:
            result: Result = line.recv()
        except (EOFError, OSError):
            self._processes[line].join()
            return Died(self._processes[line].exitcode)
        return result

    def _replace(self, line: Connection) -> Connection:
        del self._processes[line]
        line.close()
        return self._start()

    def _start(self) -> Connection:
        ours, theirs = _fork.Pipe()
        process = _fork.Process(
            target=_serve, args=(theirs, (ours, *self._processes), self._work), daemon=True
        )
        process.start()
        theirs.close()  # otherwise we would not see that it has ended
        self._processes[ours] = process
        return ours


def _serve(line: Connection, inherited: Sequence[Connection], work: Callable[[Any], Any]) -> None:
    """A process's work: tasks, until the process that gives them closes the line or ends."""
    for each in inherited:  # otherwise the others would not see that it has ended
        each.close()
    with suppress(EOFError, OSError):
        while True:
            line.send(work(line.recv()))
