"""What the engine process sends after a step, and what may wait for the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from motley import LLM
from motley.runtime.warm_up import WarmUp
from motley.server import collector as module
from motley.server.collector import Collector
from motley.server.engine_process import Worker


class _Engine:
    """As much of an engine as the collector looks at. Stands for one whose steps take 1 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.has_work, self.can_step, self.loss = True, True, None
        self.runner = SimpleNamespace(n_runs=0)
        self.sent: list[dict[str, Any]] = []
        self.collector = Collector(self, self.sent.append, hold=0.004)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(self.collector, "stats", dict)

    def request(self, number: int, *, logprobs: list[Any] | None = None) -> Any:
        request = SimpleNamespace(generated=[], logprobs=logprobs, outbox=None)
        self.collector.attach(number, request, reports_progress=False)  # type: ignore[arg-type]
        return request

    def step(self, *requests: Any) -> list[Any]:
        """A token for each; the pieces that were sent after it."""
        for request in requests:
            token = len(request.generated)
            request.generated.append(token)
            if request.logprobs is not None:
                request.logprobs.append(SimpleNamespace(logprob=-1.0, top=[]))
            request.outbox.put(f"{token} ")
        self.now += 0.001
        before = len(self.sent)
        self.collector.flush()
        return [piece for message in self.sent[before:] for piece in message.get("pieces", ())]


def test_tokens_of_quick_steps_share_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Engine(monkeypatch)
    request = engine.request(1)
    assert engine.step(request) == [[1, "0 ", [0]]]  # the first one at once
    assert [engine.step(request) for _ in range(4)] == [[], [], [], [[1, "1 2 3 4 ", [1, 2, 3, 4]]]]
    engine.now += 1  # a slow step
    assert engine.step(request) == [[1, "5 ", [5]]]


def test_the_first_token_of_another_request_takes_all_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Engine(monkeypatch)
    old = engine.request(1)
    engine.step(old)
    assert engine.step(old) == []
    new = engine.request(2)
    assert engine.step(old, new) == [[1, "1 2 ", [1, 2]], [2, "0 ", [0]]]


def test_a_request_with_probabilities_gets_each_token_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Engine(monkeypatch)
    request = engine.request(1, logprobs=[])
    assert [len(engine.step(request)) for _ in range(5)] == [1] * 5


def test_an_idle_engine_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Engine(monkeypatch)
    request = engine.request(1)
    engine.step(request)
    engine.has_work = engine.can_step = False
    assert engine.step(request) == [[1, "1 ", [1]]]


def test_the_description_of_the_model_names_its_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = WarmUp((("_matmul", 2.0), ("_norm", 0.5)), 1.5, ("_gate: no memory",), n_others=3)
    monkeypatch.setattr(LLM, "warm_up", warm_up)
    channel: Any = SimpleNamespace(send=lambda message: None)
    with LLM(n_ctx=64, devices="cpu") as llm:
        info = Worker(llm, channel, hold=0.0).info()
    assert info["details"][-3:] == [str(warm_up), "  1 × _matmul, 2.00 s", "  1 × _norm, 0.50 s"]
    assert "not compiled: _gate: no memory" in info["notices"]
