"""Drafts on a machine that is given its steps in advance, with a simulated clock: what trials cost, what drafts gain.

The CPU plays a GPU that computes padding. A step costs what a table says, and more if it was not launched in advance.
Tokens are those of a written text, whatever the model says.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from motley import LLM
from motley.backends.cuda.layouts import decode_layout
from motley.engine import Engine, Request, SamplingParams
from motley.engine.choosing import ChoiceRow, Chooser, Pending
from motley.engine.drafting import Lookup, Speculator
from motley.runtime import Runner
from random_models import RandomModel

LATE, PLAN = 0.25, 100.0  # of a step of one row: waiting for the host, and a plan
COSTS = {1: 1.0, 2: 1.3, 4: 1.35, 8: 1.45, 16: 1.8}
N_TOKENS = 400


def computed(n_rows: int) -> int:
    return next(n for n in (*COSTS, 32, 64) if n >= n_rows)


class Machine(Chooser):
    """An engine whose steps take simulated time, which passes while the host waits for their tokens."""

    text: Sequence[int] = ()

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, plans: Sequence[int] = ()) -> None:
        self.now, self.rows, self._owed = 0.0, [0], 0.0
        self._planned_rows = {1, *map(computed, plans)}
        self.plans = {self.preparation(1, 1, 1), *(self.preparation(n, 1, n) for n in plans)}
        self.llm = LLM(path, n_ctx=1024, n_parallel=16, n_batch=64, devices="cpu")
        self.engine: Engine = self.llm._loaded.engine
        self.engine._chooser = self
        self.engine._clock = lambda: self.now
        run = Runner.run

        def timed(runner: Runner, batch: Any, tokens: Any, copies: Any) -> torch.Tensor:
            n_rows = computed(len(tokens))
            self.rows.append(len(tokens))
            tables = batch.cache[0].tables
            needed = self.preparation(len(tokens), len(tables), max(table.n_rows for table in tables))
            self._owed = COSTS.get(n_rows, n_rows / 8) + LATE * (not isinstance(tokens, torch.Tensor))
            if needed not in self.plans:
                self.plans.add(needed)
                self._owed += PLAN
                runner.local.n_plans += n_rows not in self._planned_rows
                self._planned_rows.add(n_rows)
            return run(runner, batch, tokens, copies)

        monkeypatch.setattr(Runner, "run", timed)
        monkeypatch.setattr(Runner, "can_chain", True)
        self.engine.speculator = Speculator(
            [Lookup()],
            spec="auto",
            n_vocab=self.engine.n_vocab,
            preparation=self.preparation,
            computed=computed,
            plan_seconds=PLAN,
            clock=lambda: self.now,
        )
        for n_rows in plans:
            self.engine.speculator.add_plan(n_rows, n_requests=1, most_rows=n_rows)

    @staticmethod
    def preparation(n_rows: int, n_requests: int, most_rows: int) -> Hashable:
        """As on a GPU: a plan for each number of rows, and a graph for each number of requests and of their rows."""
        return computed(n_rows), decode_layout(computed(n_rows), n_requests, most_rows)

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        """Chooses the tokens of the text, and has them "on the device" at once."""
        found, owed = [self.text[row.index] for row in rows], self._owed

        def tokens() -> list[int]:
            self.now += owed
            return list(found)

        return Pending(tokens, torch.tensor(found, dtype=torch.int32))

    def answer(self, text: Sequence[int], spec: str = "auto", n_requests: int = 1) -> tuple[float, Request]:
        """Simulated seconds of an answer after its first token; of several requests with the same one at once."""
        self.text = text
        params = SamplingParams(temperature=0, max_tokens=len(text), ignore_eos=True, speculative=spec)
        request, *_ = [self.engine.add([1], params) for _ in range(n_requests)]
        self.engine.step()
        started = self.now
        self.rows = []
        while self.engine.has_work:
            self.engine.step()
        assert tuple(request.generated) == tuple(text)
        return self.now - started, request


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return RandomModel("llama", 1, 2, 1, {}).write(tmp_path / "small.gguf")


def noise(seed: int, n_kinds: int) -> list[int]:
    """A text that nothing can guess, with few kinds of tokens: most of its threes have occurred before."""
    rng = random.Random(seed)
    return [rng.randrange(3, 3 + n_kinds) for _ in range(N_TOKENS)]


@pytest.mark.parametrize("n_kinds", [4, 8, 100])
@pytest.mark.parametrize("plans", [(), (2, 4, 8, 16)], ids=["without plans", "with plans"])
def test_a_text_that_cannot_be_guessed_is_hardly_slower(
    path: Path, plans: Sequence[int], n_kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first answer and in later ones. Steps with drafts are counted: they are few, and no plan is made."""
    machine = Machine(path, monkeypatch, plans)
    for seed in range(4):
        text = noise(seed, n_kinds)
        without, _ = machine.answer(text, "off")
        took, request = machine.answer(text)
        assert took <= without / 0.98, (seed, took, without, request.drafts)
        assert sum(n > 1 for n in machine.rows) <= 12
    assert len(machine.plans) == 1 + len(plans)


def test_a_text_that_repeats_itself_is_faster(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(path, monkeypatch, (2, 4, 8, 16))
    text = (list(range(3, 63)) * 8)[:N_TOKENS]
    without, _ = machine.answer(text, "off")
    took, request = machine.answer(text)
    assert without / took > 3, request.drafts


@pytest.mark.parametrize("n_same", [8, 30])
def test_steps_of_several_requests_prepare_nothing_for_drafts_of_one(
    path: Path, n_same: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their plans are for the same number of rows, but a GPU's graphs are not: capturing one takes many steps."""
    machine = Machine(path, monkeypatch)
    for n_requests in (2, 4, 8, 16):
        machine.answer(noise(n_requests, 100)[:12], "off", n_requests)
    text = noise(1, 100)[:100] + (list(range(3, 3 + n_same)) * 100)[:156]
    before = set(machine.plans)
    without, _ = machine.answer(text, "off")
    took, request = machine.answer(text)
    assert took <= without / 0.98, request.drafts
    assert machine.plans == before


def test_plans_that_would_have_paid_are_made_in_an_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(path, monkeypatch)
    text = (list(range(3, 33)) * 40)[: 2 * N_TOKENS]
    without, _ = machine.answer(text, "off")
    first, _ = machine.answer(text)
    second, _ = machine.answer(text)
    assert len(machine.plans) > 1
    assert first < without
    assert without / second > 3
