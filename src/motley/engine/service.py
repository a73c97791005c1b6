"""The engine service: one thread owns the engine; any number of threads and event loops send messages to it.

    caller ──inbox──▶ engine thread ──outbox of each request──▶ reader

Requests, cancellations and calls are messages, handled in their order between two steps. So only this thread uses the
engine, the cache and the devices, and an interrupt (Python delivers Ctrl-C only to the main thread) cannot stop it in
the middle of a step.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from motley.engine.engine import Engine, as_motley_error
from motley.engine.request import Request
from motley.errors import LostWorkerError, MotleyError, RequestError

T = TypeVar("T")
TURN_SECONDS = 0.016  # a frame of a screen: so long new messages and readers of short steps may wait
_IDLE = 0.25  # seconds without a message and without requests: then there is time for an idle task


@dataclass(frozen=True)
class _Add:
    request: Request


@dataclass(frozen=True)
class _Cancel:
    request: Request


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    # Its error, or its result. No lock of Python's: an interrupted caller might keep it.
    answer: queue.SimpleQueue[tuple[BaseException | None, Any]] = field(default_factory=queue.SimpleQueue)
    is_revoked: bool = False


@dataclass(frozen=True)
class _Stop:
    pass


_Message = _Add | _Cancel | _Call | _Stop
_Inbox = queue.SimpleQueue[_Message]  # its `put` may be called from anywhere, `__del__` included


class EngineService:
    """Runs an engine. Every method may be called from any thread."""

    def __init__(self, engine: Engine, on_stop: Callable[[], object] = lambda: None) -> None:
        """`on_stop` is called by the engine's thread as its last act."""
        self._engine = engine
        self._inbox: _Inbox = queue.SimpleQueue()
        self._gate = _Gate()
        self._pid = os.getpid()
        inbox = self._inbox  # the engine must not refer to this service, which could then never be collected
        engine.wake = lambda: inbox.put(_Call(engine.resume))
        engine.report_loss = lambda error: inbox.put(_Call(partial(engine.lose_crew_if_broken, error)))
        self._thread = threading.Thread(
            target=_serve, args=(engine, self._inbox, on_stop), name="motley-engine", daemon=True
        )
        self._thread.start()
        # Also when the service is garbage-collected, and at exit.
        self._stop = weakref.finalize(self, _stop, self._inbox, self._gate, self._thread)

    def close(self) -> None:
        """Stops the engine's thread and waits for its end. Calling it again does no harm."""
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_open(self) -> bool:
        return not self._gate.is_closed

    def submit(self, request: Request) -> None:
        """Queues a request; its text and result are put into its outbox."""
        self._put(_Add(request))

    def cancel(self, request: Request) -> None:
        """Ends a request, if it has not ended. Does not wait for it, and takes no lock."""
        if not request.outbox.is_finished:
            self._inbox.put(_Cancel(request))

    def call(self, work: Callable[[], T]) -> T:
        """The result of `work()`, run on the engine's thread between two steps.

        An interrupt of the caller revokes the work if it has not begun.
        """
        if threading.current_thread() is self._thread:
            return work()
        call = _Call(work)
        self._put(call)
        try:
            error, result = call.answer.get()
        except BaseException:
            call.is_revoked = True
            raise
        if error is not None:
            raise error
        return cast(T, result)

    def post(self, work: Callable[[], object]) -> None:
        """Schedules `work()` on the engine's thread. It is not run once the service has stopped. Takes no lock."""
        self._inbox.put(_Call(work))

    def allow_idle_tasks(self) -> None:
        """Lets the engine do idle tasks before its first answer, too. No other thread may drive the engine then."""

        def allow() -> None:
            self._engine.may_idle = True

        self.post(allow)

    def require_reader(self) -> None:
        """Refuses to let a thread wait for an answer that can never come: the engine's own, or one of a fork."""
        self._require_own_process()
        if threading.current_thread() is self._thread:
            raise RequestError(
                "the engine's own thread cannot wait for an answer",
                hint="do not call the model in a finalizer",
            )

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise RequestError(
                "this process was forked after the model was loaded, and has no engine",
                hint="load the model in the new process, or start it with the method 'spawn'",
            )

    def _put(self, message: _Message) -> None:
        self._require_own_process()
        with self._gate.lock:
            if self._gate.is_closed:
                raise closed_error()
            self._inbox.put(message)


class _Gate:
    """Refuses messages after the engine's thread was told to stop, since they would never be read."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_closed = False


def closed_error() -> RequestError:
    return RequestError("this LLM is closed", hint="create a new LLM")


def _stop(inbox: _Inbox, gate: _Gate, thread: threading.Thread) -> None:
    with gate.lock:
        gate.is_closed = True
        inbox.put(_Stop())
    # The garbage collector may call this in any thread, also in one that the engine waits for.
    if threading.current_thread() is threading.main_thread():
        thread.join()


def _serve(engine: Engine, inbox: _Inbox, on_stop: Callable[[], object]) -> None:
    """The main function of the engine's thread."""
    try:
        _Loop(engine, inbox).run()
    finally:
        on_stop()


class _Loop:
    def __init__(self, engine: Engine, inbox: _Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._failure: MotleyError | None = None  # of the engine itself: further requests are refused

    def run(self) -> None:
        while self._handle_messages():
            if self._engine.can_step:
                self._step()
            self._engine.after_turn()
        self._engine.close(closed_error())
        self._engine.after_turn()

    def _step(self) -> None:
        self._engine.may_idle = True
        try:
            self._engine.step(TURN_SECONDS)
        except BaseException as error:  # a bug: the engine's state may be inconsistent
            self._failure = RequestError(
                f"the engine has failed: {type(error).__name__}: {error}", hint="load the model again"
            )
            self._failure.__cause__ = error
            self._engine.close(self._failure)

    def _handle_messages(self) -> bool:
        """Handles all messages in the inbox; waits for one if the engine has no work. False: stop.

        If none comes for a while, the engine does an idle task.
        """
        engine = self._engine
        is_idle = bool(engine.idle_tasks) and engine.may_idle and not engine.has_work
        try:
            for _ in range(
                max(1, self._inbox.qsize())
            ):  # not those that come meanwhile: requests would starve
                message = self._inbox.get(block=not engine.can_step, timeout=_IDLE if is_idle else None)
                if isinstance(message, _Stop):
                    self._refuse_the_rest()
                    return False
                self._handle(message)
                del message  # a finished call must not keep its tensors alive until the next one
        except queue.Empty:
            if is_idle:
                engine.run_idle_task()
        return True

    def _handle(self, message: _Message) -> None:
        match message:
            case _Add(request) if self._failure is not None:
                request.fail(self._failure)
            case _Add(request):
                self._engine.queue(request)
            case _Cancel(request):
                self._engine.cancel(request)
            case _Call():
                error = _answer(message)
                if isinstance(error, LostWorkerError):
                    self._engine.lose_crew(error)

    def _refuse_the_rest(self) -> None:
        """Drops messages after the stop. They are cancellations and posted work, and no caller waits for these."""
        while not self._inbox.empty():
            self._inbox.get()


def _answer(call: _Call) -> BaseException | None:
    """Does the work of a call and answers it. Returns its error, if it failed."""
    if call.is_revoked:
        return None
    try:
        call.answer.put((None, call.work()))
    except BaseException as error:
        call.answer.put((error if isinstance(error, Exception) else as_motley_error(error), None))
        return error
    return None
