"""Two processes: their end, the engine's death, restarts. The mock engine dies on order."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest
import requests
from serving import WAIT, RunningServer, engine_pid, is_running

DIE_AT_ONCE, DIE_AFTER_A_STEP, DIE_ONCE = 7, 8, 9


def test_sigterm_ends_both_processes_with_success() -> None:
    with RunningServer(is_mock=True) as server:
        server.wait_until_ready()
        engine = engine_pid(server)
        assert server.stop() == 0
        assert not is_running(engine)


def test_sigterm_with_a_stream_open() -> None:
    with RunningServer(is_mock=True) as server:
        server.wait_until_ready()
        body = {"prompt": "Hi", "n_predict": 10**6, "stream": True}
        with server.post("/completion", body, stream=True) as reply:
            lines = reply.iter_lines()
            next(lines)
            engine = engine_pid(server)
            server.process.send_signal(signal.SIGTERM)
            assert "stopped" in json.loads([line for line in lines if line][-1][6:])["error"]["message"]
        assert server.wait() == 0
        assert not is_running(engine)
        assert "Traceback" not in "".join(server.log)


def test_sigterm_with_a_request_that_waits_for_a_whole_answer() -> None:
    with RunningServer(is_mock=True) as server:
        server.wait_until_ready()
        replies: list[requests.Response] = []
        body = {"prompt": "Hi", "n_predict": 10**6}
        waiting = threading.Thread(target=lambda: replies.append(server.post("/completion", body)))
        waiting.start()
        while not server.get("/slots").json()[0]["is_processing"]:
            pass
        assert server.stop() == 0
        waiting.join(WAIT)
        assert replies[0].status_code == 503
        assert "Traceback" not in "".join(server.log)


def test_the_front_killed_takes_the_engine_with_it() -> None:
    with RunningServer(is_mock=True) as server:
        server.wait_until_ready()
        engine = engine_pid(server)
        server.process.kill()
        server.wait()
        for _ in range(1000):
            if not is_running(engine):
                break
            threading.Event().wait(0.02)
        assert not is_running(engine)


@pytest.mark.parametrize("order", [DIE_AT_ONCE, DIE_AFTER_A_STEP])
def test_the_engines_death_is_a_503_and_an_exit_code(order: int) -> None:
    with RunningServer(is_mock=True) as server:
        server.wait_until_ready()
        reply = server.post("/completion", {"prompt": [order], "n_predict": 100})
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "unavailable_error"
        assert server.wait() == 3


def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    with RunningServer(is_mock=True) as server:
        server.wait_until_ready()
        body = {"prompt": [DIE_AFTER_A_STEP], "max_tokens": 100}
        chunks = server.stream("/v1/completions", body)
        assert chunks[0]["choices"][0]["text"]
        assert chunks[-1]["error"]["code"] == 503


def test_with_restart_requests_that_got_nothing_are_run_again(tmp_path: Path) -> None:
    with RunningServer("--restart", is_mock=True, env={"MOCK_DIED": str(tmp_path / "died")}) as server:
        server.wait_until_ready()
        first = engine_pid(server)
        reply = server.ok("/completion", {"prompt": [DIE_ONCE], "n_predict": 5})
        assert reply["tokens_predicted"] == 5
        assert engine_pid(server) != first
        assert server.get("/health").status_code == 200
        assert server.stop() == 0


def test_with_restart_requests_that_got_something_fail() -> None:
    with RunningServer("--restart", is_mock=True) as server:
        server.wait_until_ready()
        reply = server.post("/completion", {"prompt": [DIE_AFTER_A_STEP], "n_predict": 100})
        assert reply.status_code == 503
        server.wait_until_ready()
        assert server.ok("/completion", {"prompt": "Hi", "n_predict": 3})["tokens_predicted"] == 3


def test_a_model_that_is_none_ends_the_server(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all")
    with RunningServer(str(path)) as server:
        assert server.wait() == 2
        assert any("it is not GGUF" in line for line in server.log)


def test_a_port_that_is_taken_is_said_so() -> None:
    with RunningServer(is_mock=True) as server:
        port = server.url.rsplit(":", 1)[1]
        with pytest.raises(AssertionError, match="cannot listen"):
            RunningServer("--port", port)


def test_health_answers_before_the_model_is_loaded() -> None:
    with RunningServer("-c", "64", "-t", "1") as server:
        reply = requests.get(f"{server.url}/health", timeout=WAIT)
        assert reply.status_code == 503  # torch alone takes longer than this request
        assert reply.json()["error"]["message"] == "Loading model"
        assert "fraction" in reply.json()["error"]["progress"]
