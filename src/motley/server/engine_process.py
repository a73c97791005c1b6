"""The engine process: loads a model, runs the front's requests, and sends one message a step.

Started by `engine_client` with the number of its socket. It ends when the front closes the socket, or says so.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from motley.errors import MotleyError
from motley.lean_torch import defer
from motley.server.calls import CALLS
from motley.server.collector import Collector, describe_error
from motley.server.params_wire import params_from_wire
from motley.server.wire import Channel, Message

if TYPE_CHECKING:
    from motley.engine.request import Request
    from motley.llm import LLM

_PROGRESS_EVERY = 0.1  # seconds
_CALL_THREADS = 4
_CONSTRAINTS = {"json_schema", "json_object", "regex", "grammar"}
_DRAIN = 1.0  # seconds for the last messages
_HOLD = 0.004  # seconds: see Collector
_HOLD_ALL_CORES = 0.025  # where each message takes a core from the engine


def main() -> None:
    defer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the front, which ends this process
    _die_with_parent()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    messages = channel.receive()
    first = next(messages, None)
    if first is None:
        return
    try:
        llm = _load(first, channel)
    except MotleyError as error:
        channel.send({"op": "refused", "error": describe_error(error)})
        channel.drain(_DRAIN)
        sys.exit(2)
    worker = Worker(llm, channel, hold=_hold(llm, first["arguments"].get("n_threads")))
    channel.send({"op": "ready", "info": worker.info()})
    gc.collect()
    gc.freeze()  # what loading made stays: the collector need not look at it again
    for message in messages:
        if message["op"] == "stop":
            break
        worker.handle(message)
    channel.drain(_DRAIN)
    os._exit(0)  # the front has gone or wants the end: nothing here has to be put in order


def _load(message: Message, channel: Channel) -> LLM:
    from motley.llm import LLM

    def telling(what: str) -> Callable[[int, int], None]:
        last = [0.0]

        def tell(done: int, total: int) -> None:
            now = time.monotonic()
            if now - last[0] > _PROGRESS_EVERY or done == total:
                last[0] = now
                channel.send({"op": "loading", "what": what, "done": done, "total": total})

        return tell

    llm = LLM(
        message["model"], progress=telling("bytes"), compiling=telling("kernels"), **message["arguments"]
    )
    llm.allow_idle_tasks()
    return llm


class Worker:
    """Turns messages into requests of the engine. `handle` is called by one thread."""

    def __init__(self, llm: LLM, channel: Channel, *, hold: float) -> None:
        self._llm = llm
        self._channel = channel
        self._collector = Collector(llm.engine, channel.send, hold=hold)
        self._requests: dict[int, Request | None] = {}  # None: not made yet
        self._lock = threading.Lock()
        self._calls = ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="motley-call")
        llm.engine.after_turn = self._after_turn

    def info(self) -> Message:
        """The description of the model that the front gives clients."""
        llm = self._llm
        memory = llm.memory()
        kernels = [str(llm.warm_up), *llm.warm_up.details] if llm.warm_up.kernels else []
        return {
            "n_ctx": llm.n_ctx,
            "n_parallel": llm.engine.scheduler.n_parallel,
            "n_batch": llm.engine.scheduler.n_batch,
            "n_vocab": llm.engine.n_vocab,
            "drafters": ",".join(llm.engine.speculator.default.drafters),
            "n_params": sum(tensor.n_values for tensor in llm.spec.tensors.values()),
            "size": sum(tensor.nbytes for tensor in llm.spec.tensors.values()),
            "memory": memory,
            "devices": llm.device_memory(),
            "load_seconds": llm.load_seconds,
            "notices": [*filter(None, [llm.chosen_devices]), *llm.notices, *llm.warm_up.notices],
            "details": [*llm.details, *kernels],
            "stats": self._collector.stats(),
        }

    def handle(self, message: Message) -> None:
        match message["op"]:
            case "add":
                self._requests |= dict.fromkeys((job["id"] for job in message["jobs"]), None)
                ready: list[Message] = []
                for job in message["jobs"]:
                    if job["params"].keys() & _CONSTRAINTS:  # compiling a grammar must not hold up the others
                        self._calls.submit(self._add, [job])
                    else:
                        ready.append(job)
                self._add(ready)
            case "cancel":
                with self._lock:
                    request = self._requests.pop(message["id"], None)
                if request is not None:
                    self._llm.service.cancel(request)
            case "call":
                self._calls.submit(self._call, message)

    def _add(self, jobs: list[Message]) -> None:
        """Makes requests, and submits them together: a step takes all that are there."""
        made: dict[int, Request] = {}
        for job in jobs:
            leader = made.get(job["leader"]) or self._requests.get(job["leader"])
            if (request := self._made(job, leader)) is not None:
                made[job["id"]] = request
        if not made:
            return
        self._channel.send({"op": "accepted", "ids": list(made)})
        with self._lock:
            cancelled = [number for number in made if number not in self._requests]  # while it was made
            self._requests |= made
        for request in made.values():
            self._llm.service.submit(request)
        for number in cancelled:
            self._llm.service.cancel(made[number])

    def _made(self, job: Message, leader: Request | None) -> Request | None:
        """A request, not submitted; None: it was refused, and the front was told."""
        try:
            request = self._llm.engine.new_request(
                job["tokens"],
                params_from_wire(job["params"]),
                continues_prompt=job["continues"],
                shows_special=job["special"],
                leader=leader,
            )
            self._collector.attach(job["id"], request, reports_progress=job["progress"])
        except Exception as error:  # of this request only
            self._channel.send({"op": "rejected", "id": job["id"], "error": describe_error(error)})
            return None
        return request

    def _after_turn(self) -> None:
        """Engine thread."""
        for number in self._collector.flush():
            with self._lock:
                self._requests.pop(number, None)

    def _call(self, message: Message) -> None:
        answer: Message = {"op": "answer", "id": message["id"]}
        try:
            answer["result"] = CALLS[message["name"]](self._llm, **message["arguments"])
            self._llm.service.call(lambda: None)  # the figures of its steps are sent before its answer
        except Exception as error:
            answer["error"] = describe_error(error)
        self._channel.send(answer)


def _hold(llm: LLM, n_threads: int | None) -> float:
    """Longer where the engine's own threads have all cores of the machine."""
    has_cpu = any(label.startswith("cpu") for label in llm.device_memory())
    has_all = n_threads is None or n_threads >= len(os.sched_getaffinity(0))
    return _HOLD_ALL_CORES if has_cpu and has_all else _HOLD


def _die_with_parent() -> None:
    """Linux: the kernel ends this process with the front, however that ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
