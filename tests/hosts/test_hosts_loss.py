"""Workers that are killed, stopped or fail: they are named, requests are computed again with the same text."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from worker_process import WorkerProcess

from motley import LLM
from motley.errors import DeviceError, FailedWorkerError, LostWorkerError, RequestError
from motley.runtime.hosts import remote

TOKENS: list[int] = np.random.default_rng(5).integers(1, 250, 60).tolist()
# Without drafts, each token is a step.
OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_parallel": 2,
    "n_batch": 48,
    "kv_block_size": 16,
    "n_threads": 1,
    "spec": "off",
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
SECONDS = 120


@pytest.fixture(scope="module")
def running() -> Iterator[list[WorkerProcess]]:
    found: list[WorkerProcess] = []
    yield found
    for each in found:
        each.kill()


@pytest.fixture
def worker(running: list[WorkerProcess]) -> WorkerProcess:
    """A worker process: that of the test before, if it is still there."""
    if not running or not running[-1].is_alive:
        running.append(WorkerProcess())
    return running[-1]


@pytest.fixture(scope="module")
def expected(random_llama: Path) -> tuple[int, ...]:
    with LLM(random_llama, devices="cpu", **OPTIONS) as llm:
        return llm.generate(TOKENS[:30], **GREEDY).tokens


def open_llm(path: Path, worker: WorkerProcess, mode: str = "tensor", **options: Any) -> LLM:
    """A crew with a worker. Mode "groups": two devices in each process, which split the same layers."""
    names, split_mode = f"cpu,cpu@{worker.address}", mode
    if mode == "groups":
        names, split_mode = f"(cpu,cpu),(cpu,cpu)@{worker.address}", "layer"
    return LLM(path, devices=names, split_mode=split_mode, **(OPTIONS | options))


def at_token(llm: LLM, n: int, act: Callable[[], object]) -> Any:
    """The answer to the test's prompt; `act` is called before the step for its `n`-th token, by the engine's thread."""
    runner = llm._loaded.runner
    run, n_runs = runner.run, 0

    def counted(*given: Any) -> torch.Tensor:
        nonlocal n_runs
        n_runs += 1
        if n_runs == n:
            act()
        return run(*given)

    with patch.object(runner, "run", counted):
        return llm.generate(TOKENS[:30], **GREEDY)


def back_again(running: list[WorkerProcess]) -> None:
    """Kills the worker, and starts another one at the same port."""
    running[-1].kill()
    running.append(WorkerProcess(port=running[-1].port))


@pytest.mark.parametrize("mode", ["tensor", pytest.param("layer", marks=pytest.mark.slow), "groups"])
def test_a_killed_worker_comes_back_and_the_text_is_the_same(
    mode: str,
    random_llama: Path,
    worker: WorkerProcess,
    running: list[WorkerProcess],
    expected: tuple[int, ...],
) -> None:
    with open_llm(random_llama, worker, mode) as llm:
        assert llm.generate(TOKENS[:30], **GREEDY).tokens == expected
        # The prefix cache would have the whole prompt, but its blocks are lost with the worker.
        found = at_token(llm, 10, lambda: back_again(running))
        assert found.tokens == expected
        assert llm._loaded.engine.n_losses == 1
        assert llm.generate(TOKENS[:30], **GREEDY).tokens == expected
        llm._call(llm._loaded.cache.check_integrity)


def test_a_worker_that_is_killed_while_nothing_runs_is_missed_and_found_again(
    random_llama: Path, worker: WorkerProcess, running: list[WorkerProcess], expected: tuple[int, ...]
) -> None:
    with open_llm(random_llama, worker) as llm:
        engine, lost, back = llm._loaded.engine, threading.Event(), threading.Event()
        engine.after_turn = lambda: (lost if engine.loss else back).set()
        worker.kill()
        assert lost.wait(SECONDS)
        assert worker.address in str(engine.loss)
        back.clear()
        running.append(WorkerProcess(port=worker.port))
        assert back.wait(SECONDS)
        assert llm.generate(TOKENS[:30], **GREEDY).tokens == expected


def test_requests_fail_with_the_worker_s_name_if_they_shall_not_wait(
    random_llama: Path, worker: WorkerProcess
) -> None:
    with open_llm(random_llama, worker, on_loss="fail") as llm:
        with pytest.raises(LostWorkerError, match=worker.address):
            at_token(llm, 5, worker.kill)
        with pytest.raises(LostWorkerError, match=worker.address):
            llm.generate(TOKENS[:5], max_tokens=2)


@pytest.mark.slow
def test_of_two_workers_the_killed_one_is_named(
    random_llama: Path, worker: WorkerProcess, running: list[WorkerProcess]
) -> None:
    """The other one fails, too, since it waits for the killed one."""
    running.append(WorkerProcess())
    names = f"cpu,cpu@{worker.address},cpu@{running[-1].address}"
    with (
        LLM(random_llama, devices=names, split_mode="tensor", on_loss="fail", **OPTIONS) as llm,
        pytest.raises(LostWorkerError) as failure,
    ):
        at_token(llm, 5, running[-1].kill)
    assert failure.value.host == running[-1].address
    running.pop()


@pytest.mark.slow
def test_a_silent_worker_is_lost(
    random_llama: Path, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: its connections stay open, and only the heartbeat ends the wait for its part of a sum."""
    monkeypatch.setattr(remote, "SILENT_SECONDS", 2.0)
    with open_llm(random_llama, worker, on_loss="fail") as llm:
        with pytest.raises(LostWorkerError, match=r"has not answered for \d+ s"):
            at_token(llm, 5, lambda: worker.signal(signal.SIGSTOP))
        worker.signal(signal.SIGCONT)
    with open_llm(random_llama, worker) as llm:  # it has given the lost crew up, and takes the next one
        assert llm.generate(TOKENS[:5], max_tokens=3, ignore_eos=True).tokens


def test_a_worker_survives_the_loss_of_rank_0(
    random_llama: Path, worker: WorkerProcess, expected: tuple[int, ...]
) -> None:
    llm = open_llm(random_llama, worker, on_loss="fail")
    hosts = llm._loaded.runner._hosts
    assert hosts is not None
    hosts.workers[0]._channel.close()  # as if this process had been killed
    worker.wait_for("is lost")
    with open_llm(random_llama, worker) as other:
        assert other.generate(TOKENS[:30], **GREEDY).tokens == expected
    llm.close()


def test_a_failure_in_a_worker_is_told_and_the_crew_goes_on(
    random_llama: Path, worker: WorkerProcess, expected: tuple[int, ...]
) -> None:
    """A message that a worker refuses ends its crew; the next connection is a new beginning."""
    with open_llm(random_llama, worker) as llm:
        hosts = llm._loaded.runner._hosts
        assert hosts is not None
        llm._call(lambda: hosts.workers[0]._send(remote.Kind.RUN, b"\xff" * 64))
        worker.wait_for("a step failed")
        assert llm.generate(TOKENS[:30], **GREEDY).tokens == expected
        assert llm._loaded.engine.n_losses == 1


def test_a_request_that_always_fails_in_a_worker_ends_with_its_error(
    random_llama: Path, worker: WorkerProcess, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in one process: it is tried once more, alone. Others go on."""
    with open_llm(random_llama, worker) as llm:
        hosts = llm._loaded.runner._hosts
        assert hosts is not None
        run = type(hosts).run

        def spoilt(self: Any, shape: Any, batch: Any, inputs: Any, copies: Any) -> None:
            """A step of many tokens is one that the worker refuses."""
            if shape.n_tokens < 40:
                run(self, shape, batch, inputs, copies)
            else:
                self.workers[0]._send(remote.Kind.RUN, b"\xff" * 64)

        monkeypatch.setattr(type(hosts), "run", spoilt)
        requests = [llm.stream(TOKENS[:30], **GREEDY), llm.stream(TOKENS[:9:-1], **GREEDY)]
        assert requests[0].finish().tokens == expected
        with pytest.raises(FailedWorkerError, match=f"the worker {worker.address} has failed"):
            requests[1].finish()
        assert llm._loaded.engine.n_losses == 2
        assert llm.generate(TOKENS[:30], **GREEDY).tokens == expected


@pytest.mark.parametrize("mode", ["tensor", "groups"])
def test_a_device_of_this_process_that_fails_breaks_the_crew_off_and_it_is_connected_again(
    mode: str,
    random_llama: Path,
    worker: WorkerProcess,
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_llm(random_llama, worker, mode) as llm:
        local = llm._loaded.runner.local
        run, n_runs = local.run, 0

        def failing(*arguments: Any) -> Any:
            nonlocal n_runs
            n_runs += 1
            if n_runs == 5:
                raise MemoryError("no memory for this step")
            return run(*arguments)

        monkeypatch.setattr(local, "run", failing)
        found = llm.generate(TOKENS[:30], **GREEDY)
        assert found.tokens == expected
        assert found.timings.n_retries == 1
        assert llm._loaded.engine.n_losses == 1


def test_a_raw_sequence_ends_with_the_worker(
    random_llama: Path, worker: WorkerProcess, running: list[WorkerProcess]
) -> None:
    with open_llm(random_llama, worker) as llm:
        with llm.raw_sequence() as sequence:
            sequence.feed(TOKENS[:20])
            back_again(running)
            with pytest.raises((LostWorkerError, RequestError)):
                sequence.feed(TOKENS[20:])
            llm.generate(TOKENS[:5], max_tokens=1)  # waits until the worker is back
            with pytest.raises(RequestError, match="lost"):
                sequence.feed(TOKENS[20:])
        llm._call(llm._loaded.cache.check_integrity)


def test_closing_while_a_worker_is_missing(random_llama: Path, worker: WorkerProcess) -> None:
    llm = open_llm(random_llama, worker)
    stream = llm.stream(TOKENS[:30], **GREEDY)
    next(iter(stream))
    worker.kill()
    with pytest.raises(RequestError, match="closed"):  # noqa: PT012  the thread ends what the test waits for
        threading.Timer(0.5, llm.close).start()
        stream.finish()
    llm.close()
    assert not [t for t in threading.enumerate() if t.name == "motley-restore" and t.join(SECONDS)]


def test_no_worker_is_said_at_once(random_llama: Path) -> None:
    with pytest.raises(DeviceError, match=r"no worker answers at 127\.0\.0\.1:1") as failure:
        LLM(random_llama, devices="cpu,cpu@127.0.0.1:1", **OPTIONS)
    assert "motley worker --listen 127.0.0.1:1" in str(failure.value)
