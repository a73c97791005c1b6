"""Starts and ends the server: its socket, the engine process, signals, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from motley.errors import ConfigError, MotleyError
from motley.server.engine_client import EngineClient
from motley.server.errors import ApiError
from motley.server.front import Front, make_app
from motley.server.http import protocol_with
from motley.server.settings import ServerSettings

_log = logging.getLogger("motley.server")

OK, REFUSED, ENGINE_DIED = 0, 2, 3  # exit codes
_FINISH_SECONDS = 3  # for running requests after SIGTERM; then they end with an error
_LAST_SECONDS = 1  # for clients to take that
_MAX_FILES = 65_536
_MAX_WAITING = 1024  # connections that wait to be accepted
_OWN_FILES = 64  # that are no connections
_AFTER_DEATH = 0.5  # seconds in which requests still get a 503


def serve(settings: ServerSettings) -> int:
    """Runs the server until a signal; returns the exit code."""
    listening = _listen(settings.host, settings.port)
    try:
        return asyncio.run(_serve(settings, listening))
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_MAX_WAITING)
        listening.setblocking(False)
        return listening
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="another --port (0: any free one) or --host",
        ) from None


def _room_for_connections() -> tuple[int, int]:
    """How many connections the limit of open files allows, after raising it as far as this process may; and how many
    are accepted at once, which is some turns of the event loop before others are dropped for them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_at_once = max(8, min(_MAX_WAITING, n_files // 16))
    return max(1, n_files - _OWN_FILES - 4 * n_at_once), n_at_once


class _Server(uvicorn.Server):
    """Signals are handled by `_serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(settings: ServerSettings, listening: socket.socket) -> int:
    arguments = dict(settings.engine_arguments)
    engine = EngineClient(
        settings.model,
        arguments,
        max_queue=settings.max_queue,
        restarts=settings.restarts,
        command=settings.engine_command,
    )
    front = Front(settings, engine)
    max_connections, n_at_once = _room_for_connections()
    config = uvicorn.Config(
        make_app(front),
        http=protocol_with(settings.limits, max_connections),
        backlog=n_at_once,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        timeout_graceful_shutdown=_FINISH_SECONDS + _LAST_SECONDS,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    front.is_leaving = lambda: server.should_exit
    loop = asyncio.get_running_loop()

    def leave() -> None:
        if server.should_exit:
            server.force_exit = True  # the second signal
        else:
            loop.call_later(_FINISH_SECONDS, engine.end_all, ApiError(503, "the server has been stopped"))
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    engine.on_ready = lambda: _say_ready(front, listening)
    _say(f"listening on {address_of(listening)} while {settings.model.name} is loaded")
    await engine.start()
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    reading = asyncio.create_task(front.read_model())
    watching = asyncio.create_task(_watch(engine, server))
    code = OK
    try:
        await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and (error := reading.exception()) is not None:
            if not isinstance(error, MotleyError):
                raise error
            _report(str(error))
            code, server.should_exit = REFUSED, True
        gc.collect()
        gc.freeze()
        if not serving.done():
            listening.listen(_MAX_WAITING)  # asyncio has set it to the number that it accepts at once
        await serving
    finally:
        watching.cancel()
        await engine.stop()
    if engine.ended.is_set():
        code = REFUSED if engine.refusal is not None else ENGINE_DIED
    return code


async def _watch(engine: EngineClient, server: uvicorn.Server) -> None:
    """Ends the server when the engine has ended."""
    await engine.ended.wait()
    if engine.refusal is not None:
        _report(engine.refusal.message)
    else:
        _report(f"the engine process has ended (exit code {engine.exit_code})")
        await asyncio.sleep(_AFTER_DEATH)
    server.should_exit = True


def _say_ready(front: Front, listening: socket.socket) -> None:
    for notice in front.engine.info.get("notices", ()):
        _log.info("note: %s", notice)
    for detail in front.engine.info.get("details", ()) if front.settings.is_verbose else ():
        _log.info("%s", detail)
    _say(f"motley serves {front.settings.model_name} on {address_of(listening)}")


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(text: str) -> None:
    _say(f"error: {text}")
