"""The front's end of the engine process: starts it, sends it jobs, and puts what comes back into mailboxes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motley.server.errors import ApiError, of_engine
from motley.server.jobs import End, Job, Mailbox, Piece, Progress
from motley.server.params_wire import params_to_wire
from motley.server.slots import Slots
from motley.server.wire import Frames, Message, encode

_log = logging.getLogger("motley.server")

_SEND_BUFFER = 4 * 2**20  # bytes of the socket between the processes
_STOP_SECONDS = 1.0  # for the engine to end without being killed
_GATHER_SECONDS = 0.001  # in which jobs are gathered into a message, if they come together

LOADING, READY, DEAD = "loading", "ready", "dead"


@dataclass(eq=False)
class Ticket:
    """A job that was sent to the engine."""

    number: int
    job: Job
    index: int  # in its mailbox
    mailbox: Mailbox
    accepted: asyncio.Future[None]
    has_sent: bool = False  # something came back for it
    is_cancelled: bool = False
    submitted: float = 0.0
    generated: list[int] = field(default_factory=list)
    leader: int | None = None  # the number of the ticket that computes its prompt


class EngineClient:
    """Used by the event loop's thread only."""

    def __init__(
        self,
        model: Path,
        arguments: dict[str, Any],
        *,
        n_slots: int = 1,
        max_queue: int = 1024,
        restarts: bool = False,
        command: Sequence[str] | None = None,
    ) -> None:
        """`command`: what to start instead of the engine process, with the socket's number appended."""
        self.state = LOADING
        self.loading: Message = {"what": "bytes", "done": 0, "total": 0}
        self.info: Message = {}
        self.stats: Message = {}
        self.slots = Slots(n_slots)
        self.refusal: ApiError | None = None  # why the model cannot be loaded
        self.on_end: Callable[[End, Ticket], None] = lambda end, ticket: None
        self.on_ready: Callable[[], None] = lambda: None
        self.ended: asyncio.Event = asyncio.Event()  # the process has ended and is not started again
        self._model = model
        self._arguments = arguments
        self._max_queue = max_queue
        self._restarts = restarts
        self._command = list(command or (sys.executable, "-m", "motley.server.engine_process"))
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._tickets: dict[int, Ticket] = {}
        self._touched: dict[Mailbox, None] = {}  # got something since `wake_readers`; an ordered set
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._unsent: list[Message] = []  # jobs
        self._unsent_since = 0.0
        self._last_number = 0
        self._n_failed_starts = 0
        self._is_stopping = False

    # Life

    async def start(self) -> None:
        """Starts the process; it loads the model while this returns."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._process = subprocess.Popen(
            [*self._command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the front, which ends this process
        )
        theirs.close()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: _Connection(self), sock=ours)
        self._transport = transport
        self._send({"op": "load", "model": str(self._model), "arguments": self._arguments})

    async def stop(self) -> None:
        """Ends the process, by force if it does not end at once."""
        self._is_stopping = True
        if self._process is None:
            return
        self._send({"op": "stop"})
        if self._transport is not None:
            self._transport.close()
        ends = time.monotonic() + _STOP_SECONDS
        while self._process.poll() is None and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        if self._process.poll() is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def n_waiting(self) -> int:
        return self.slots.n_deferred

    # Jobs

    def submit(self, jobs: Sequence[Job], mailbox: Mailbox) -> list[Ticket]:
        """Sends jobs to the engine. 503 if there is none, 429 if too many wait."""
        self.require_ready()
        if self.slots.n_deferred + len(jobs) > self._max_queue + self.slots.n_free:
            raise ApiError(
                429,
                f"{self.slots.n_deferred} requests are waiting already",
                headers={"Retry-After": "5"},
            )
        loop = asyncio.get_running_loop()
        tickets: list[Ticket] = []
        for index, job in enumerate(jobs):
            self._last_number += 1
            ticket = Ticket(
                self._last_number, job, index, mailbox, loop.create_future(), submitted=time.monotonic()
            )
            if job.leader is not None:
                ticket.leader = tickets[job.leader].number
            self._tickets[ticket.number] = ticket
            self.slots.take(ticket.number, job, ticket.generated)
            tickets.append(ticket)
            self._add(ticket)
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Ends jobs that have not ended."""
        for ticket in tickets:
            if ticket.number in self._tickets and not ticket.is_cancelled:
                ticket.is_cancelled = True
                self._send({"op": "cancel", "id": ticket.number})

    def end_all(self, error: ApiError) -> None:
        """Ends all jobs with this error."""
        self.cancel(list(self._tickets.values()))
        for ticket in list(self._tickets.values()):
            self._fail(ticket, error)
        self.wake_readers()

    async def call(self, name: str, **arguments: Any) -> Any:
        """The result of a function of `calls`, run by the engine process."""
        self.require_ready()
        self._last_number += 1
        number = self._last_number
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send({"op": "call", "id": number, "name": name, "arguments": arguments})
        try:
            return await future
        finally:
            self._calls.pop(number, None)

    def require_ready(self) -> None:
        if self.state == LOADING:
            raise ApiError(503, "Loading model", headers={"Retry-After": "1"})
        if self.state == DEAD:
            raise ApiError(503, "the engine has ended", headers={"Retry-After": "1"})

    def _add(self, ticket: Ticket) -> None:
        """Jobs that come in the same turn of the event loop share a message, which wakes the engine process once."""
        job = ticket.job
        now = time.monotonic()
        if not self._unsent:
            self._unsent_since = now
            asyncio.get_running_loop().call_soon(self._send_jobs)
        self._unsent.append(
            {
                "id": ticket.number,
                "tokens": job.tokens,
                "params": params_to_wire(job.params),
                "continues": job.continues_prompt,
                "progress": job.reports_progress,
                "special": job.shows_special,
                "leader": ticket.leader,
            }
        )
        if now - self._unsent_since > _GATHER_SECONDS:
            self._send_jobs()

    def _send_jobs(self) -> None:
        if self._unsent:
            jobs, self._unsent = self._unsent, []
            self._write({"op": "add", "jobs": jobs})

    def _send(self, message: Message) -> None:
        self._send_jobs()  # a cancellation comes after its job
        self._write(message)

    def _write(self, message: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    # What comes back

    def receive(self, message: Message) -> None:
        match message["op"]:
            case "step":
                self._receive_step(message)
            case "accepted":
                for number in message["ids"]:
                    ticket = self._tickets.get(number)
                    if ticket is not None and not ticket.accepted.done():
                        ticket.accepted.set_result(None)
            case "rejected":
                ticket = self._tickets.get(message["id"])
                if ticket is not None:
                    self._fail(ticket, of_engine(message["error"]))
            case "answer":
                self._receive_answer(message)
            case "loading":
                self.loading = message
            case "ready":
                self._become_ready(message["info"])
            case "refused":
                self.refusal = of_engine(message["error"])

    def wake_readers(self) -> None:
        """Called once for all messages that were read together: a front that is behind writes longer chunks."""
        touched, self._touched = self._touched, {}
        for mailbox in touched:
            mailbox.wake()

    def _receive_step(self, message: Message) -> None:
        tickets, touched = self._tickets, self._touched
        for line in message.get("progress", ()):
            number, *figures = line
            if (ticket := tickets.get(number)) is not None:
                ticket.mailbox.put(Progress(ticket.index, *figures))
                touched[ticket.mailbox] = None
        for piece in message.get("pieces", ()):
            if (ticket := tickets.get(piece[0])) is not None:
                ticket.generated += piece[2]
                ticket.has_sent = True
                if ticket.job.discards_answer:
                    continue
                mailbox = ticket.mailbox
                mailbox.put(Piece(ticket.index, *piece[1:]))
                touched[mailbox] = None
                if mailbox.is_overfull:
                    self.cancel([ticket])
        for end in message.get("ends", ()):
            if (ticket := tickets.get(end["id"])) is not None:
                self._end(ticket, end)
        if "stats" in message:
            self.stats = message["stats"]

    def _receive_answer(self, message: Message) -> None:
        future = self._calls.get(message["id"])
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(of_engine(message["error"]))
        else:
            future.set_result(message["result"])

    def _become_ready(self, info: Message) -> None:
        self.info, self.stats, self.state = info, info["stats"], READY
        self._n_failed_starts = 0
        if len(self.slots.all) != info["n_parallel"]:
            self.slots.resize(info["n_parallel"])
        for ticket in self._tickets.values():  # of an engine before this one
            self._add(ticket)
        self.on_ready()

    def _end(self, ticket: Ticket, end: Message) -> None:
        error = None if end["error"] is None else of_engine(end["error"])
        self._finish(
            ticket,
            End(
                choice=ticket.index,
                reason=end["reason"],
                stop=end["stop"],
                n_prompt=end["prompt_tokens"],
                n_cached=end["cached_tokens"],
                n_new=0 if ticket.job.discards_answer else end["new_tokens"],
                queued_seconds=end["queued_seconds"],
                prompt_seconds=end["prompt_seconds"],
                new_seconds=end["new_seconds"],
                n_preemptions=end["n_preemptions"],
                n_retries=end["n_retries"],
                id_slot=self.slots.of(ticket.number),
                error=error,
                n_drafts=end["n_drafts"],
                n_drafted=end["n_drafted"],
                n_accepted=end["n_accepted"],
            ),
        )

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        n_prompt = len(ticket.job.tokens)
        end = End(
            ticket.index,
            "failed",
            None,
            n_prompt,
            0,
            0,
            0.0,
            0.0,
            0.0,
            0,
            0,
            self.slots.of(ticket.number),
            error,
        )
        if not ticket.accepted.done():
            ticket.accepted.set_exception(error)
            ticket.accepted.exception()  # read: a client that has left does not await it
        self._finish(ticket, end)

    def _finish(self, ticket: Ticket, end: End) -> None:
        del self._tickets[ticket.number]
        self.slots.release(ticket.number, [*ticket.job.tokens, *ticket.generated[:-1]])
        if not ticket.accepted.done():
            ticket.accepted.set_result(None)
        ticket.mailbox.put_end(end)
        self._touched[ticket.mailbox] = None
        self.on_end(end, ticket)

    # Its death

    def lost(self) -> None:
        """The engine process has closed its end."""
        if self._is_stopping:
            return
        self.state = LOADING if self._restarts and self.refusal is None else DEAD
        self._unsent.clear()  # tickets of unfinished answers are added again
        error = ApiError(503, "the engine has ended while it worked on this request")
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        for ticket in list(self._tickets.values()):
            if self.state == DEAD or ticket.has_sent or ticket.is_cancelled:
                self._fail(ticket, error)
        self.wake_readers()
        if self.state == DEAD:
            self.ended.set()
            return
        _log.error("the engine process has ended; it is started again")
        self._n_failed_starts += 1
        self._restart_task = asyncio.create_task(self._restart())  # kept: the event loop holds tasks weakly

    async def _restart(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
        if self._n_failed_starts > 1:  # it may die while loading, again and again
            await asyncio.sleep(min(30.0, 0.5 * 2**self._n_failed_starts))
        if not self._is_stopping:
            await self.start()


class _Connection(asyncio.Protocol):
    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._client.receive(message)
        self._client.wake_readers()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost()
