"""`make test-hosts`: a worker in a network namespace of its own that is killed, stopped and cut off at random moments.

Needs root and network namespaces. Not part of `make test`: it takes some minutes. MOTLEY_MOMENTS sets how many moments.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_process import WorkerProcess

from motley import LLM
from motley.runtime.hosts import calling, remote

N_MOMENTS = int(os.environ.get("MOTLEY_MOMENTS", "50"))
SPACE, HERE, THERE = "motley-test", "motley-a", "motley-b"
OURS, THEIRS = "10.77.0.1", "10.77.0.2"
PROMPTS = [np.random.default_rng(i).integers(1, 250, 20 + i).tolist() for i in range(6)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_parallel": 4, "n_threads": 1}


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Two namespaces with a cable: this one, and that of the worker."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    ip("netns", "del", SPACE, check=False)
    try:
        ip("netns", "add", SPACE)
        ip("link", "add", HERE, "type", "veth", "peer", "name", THERE, "netns", SPACE)
        ip("addr", "add", f"{OURS}/24", "dev", HERE)
        ip("link", "set", HERE, "up")
        ip("-n", SPACE, "addr", "add", f"{THEIRS}/24", "dev", THERE)
        ip("-n", SPACE, "link", "set", THERE, "up")
        ip("-n", SPACE, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield
    ip("netns", "del", SPACE, check=False)
    ip("link", "del", HERE, check=False)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o600)
    return path


def start(secret: Path, port: int = 0) -> WorkerProcess:
    inside = ("ip", "netns", "exec", SPACE)
    return WorkerProcess("--secret-file", str(secret), port=port, host=THEIRS, prefix=inside)


@pytest.mark.parametrize(
    ("names", "mode", "n_moments"),
    [("cpu,cpu@worker", "tensor", N_MOMENTS), ("(cpu,cpu),(cpu,cpu)@worker", None, N_MOMENTS // 2)],
)
def test_no_moment_loses_a_request(
    names: str,
    mode: str | None,
    n_moments: int,
    network: None,
    secret: Path,
    random_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "SILENT_SECONDS", 3.0)
    local = names.replace("@worker", "")
    with LLM(random_llama, devices=local, split_mode=mode, n_ctx=256, n_threads=2) as llm:
        expected = [llm.generate(prompt, **GREEDY).tokens for prompt in PROMPTS]
    workers = [start(secret)]
    rng = random.Random(11)
    is_over = threading.Event()
    wrong: list[Any] = []
    n_done = 0
    try:
        llm = LLM(
            random_llama,
            devices=names.replace("@worker", f"@{workers[0].address}"),
            split_mode=mode,
            secret_file=secret,
            wire="f32",
            **OPTIONS,
        )

        def ask(number: int) -> None:
            nonlocal n_done
            while not is_over.is_set():
                found = llm.generate(PROMPTS[number], **GREEDY)
                n_done += 1
                if found.tokens != expected[number]:
                    wrong.append((number, found))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(n_moments):
            time.sleep(rng.uniform(0.1, 1.0))
            match rng.choice(["kill", "stop", "cut"]):
                case "kill":
                    workers[-1].kill()
                    workers.append(start(secret, workers[0].port))
                case "stop":
                    workers[-1].signal(signal.SIGSTOP)
                    time.sleep(4)
                    workers[-1].signal(signal.SIGCONT)
                case "cut":
                    ip("link", "set", HERE, "down")
                    time.sleep(4)
                    ip("link", "set", HERE, "up")
            before = n_done
            end = time.monotonic() + 300
            while n_done < before + 3:  # it goes on
                assert time.monotonic() < end, f"no answers: {llm._loaded.engine.loss}"
                time.sleep(0.05)
        is_over.set()
        for thread in threads:
            thread.join(300)
        assert not wrong
        assert (
            llm._loaded.engine.n_losses >= n_moments * 3 // 4
        )  # some fall between two steps of a fast model
        llm._call(llm._loaded.cache.check_integrity)
        assert llm._call(llm._loaded.cache.stats).n_sequences == 0
        llm.close()
        names = [thread.name for thread in threading.enumerate()]
        assert "motley-restore" not in names
    finally:
        is_over.set()
        for worker in workers:
            worker.kill()


def test_garbage_on_the_port_for_a_while(network: None, secret: Path) -> None:
    worker = start(secret)
    try:
        rng = random.Random(3)
        end = time.monotonic() + (60 if N_MOMENTS >= 50 else N_MOMENTS)
        while time.monotonic() < end:
            with socket.create_connection((THEIRS, worker.port), timeout=60) as connection:
                connection.settimeout(0.01)
                with suppress(OSError):
                    connection.sendall(rng.randbytes(rng.randint(0, 200)))
                    connection.recv(100)
        assert worker.is_alive
        assert calling.describe_host(worker.address, secret.read_bytes())
    finally:
        worker.kill()
