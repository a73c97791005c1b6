"""Sampled tokens have the model's distribution, jointly, with every drafter: a chi-squared test of three tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_hand import stepped_by_hand

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine import Request, SamplingParams
from motley.engine.drafting import Draft
from motley.engine.drafting.control import FixedControl
from motley.engine.engine import Engine

N_DRAWS = 1600
TOP_P = 0.75
# It repeats itself, so that there is something to look up, and the model often goes on otherwise.
TEXT = "One day, a little girl named Lily went to the park. One day, a little girl named Lily went to the"
MIN_DRAFTS = 200  # with fewer, the test would say little about drafts
Triple = tuple[int, int, int]


class Model:
    """The exact distribution of the next three tokens after a prompt."""

    def __init__(self, llm: LLM) -> None:
        self.prompt = llm.tokenizer.encode(TEXT)
        self._llm = llm
        self._known: dict[tuple[int, ...], dict[int, float]] = {}

    def after(self, *tokens: int) -> dict[int, float]:
        """The probabilities of the next token: temperature 1, then the smallest set that has `TOP_P`."""
        if tokens not in self._known:
            logits = self._llm.logits([*self.prompt, *tokens])[-1].astype(np.float64)
            probs = np.exp(logits - logits.max())
            probs /= probs.sum()
            order = np.argsort(-probs, kind="stable")
            n_kept = int(np.searchsorted(probs[order].cumsum(), TOP_P)) + 1
            kept = order[:n_kept]
            self._known[tokens] = dict(
                zip(kept.tolist(), (probs[kept] / probs[kept].sum()).tolist(), strict=True)
            )
        return self._known[tokens]

    def joint(self) -> dict[Triple, float]:
        return {
            (a, b, c): p * q * r
            for a, p in self.after().items()
            for b, q in self.after(a).items()
            if p * q > 0.002
            for c, r in self.after(a, b).items()
        }


def draws(engine: Engine, prompt: list[int], spec: str) -> Counter[Triple]:
    """Three tokens for each of many seeds, of requests that have drafts."""
    found: Counter[Triple] = Counter()
    n_drafted = 0
    for first in range(0, N_DRAWS, 16):
        requests = [
            engine.add(
                prompt,
                SamplingParams(
                    temperature=1,
                    top_k=0,
                    top_p=TOP_P,
                    min_p=0,
                    seed=seed,
                    max_tokens=4,  # so that two of the three tokens may be drafted at once
                    ignore_eos=True,
                    speculative=spec,
                ),
            )
            for seed in range(first, first + 16)
        ]
        while engine.has_work:
            engine.step()
        found.update((r.generated[0], r.generated[1], r.generated[2]) for r in requests)
        n_drafted += sum(spec in request.drafts for request in requests)
    assert n_drafted >= MIN_DRAFTS, spec
    return found


def z_score(found: Counter[Triple], expected: dict[Triple, float]) -> float:
    """The chi-squared statistic as a standard normal variate (Wilson, Hilferty). Rare triples are in the last cell."""
    cells = [triple for triple, p in expected.items() if p * N_DRAWS >= 8]
    counts = np.array([found[triple] for triple in cells])
    means = N_DRAWS * np.array([expected[triple] for triple in cells])
    counts[-1] += N_DRAWS - counts.sum()
    means[-1] += N_DRAWS - means.sum()
    assert len(cells) > 12
    statistic = float(((counts - means) ** 2 / means).sum())
    n = len(cells) - 1
    return float(((statistic / n) ** (1 / 3) - (1 - 2 / (9 * n))) / (2 / (9 * n)) ** 0.5)


@pytest.fixture(scope="module")
def llm(bundled: Path) -> Any:
    options: dict[str, Any] = {"n_ctx": 64, "n_parallel": 16, "n_batch": 256, "draft_max": 3}
    with LLM(bundled, draft_model=bundled_draft_path(), **options) as llm:
        llm._loaded.engine.speculator._control = FixedControl()
        yield llm


@pytest.fixture(scope="module")
def model(llm: LLM) -> Model:
    model = Model(llm)
    model.joint()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["lookup", "lookahead", "draft", "exit"])
def test_three_tokens_have_the_models_joint_distribution(llm: LLM, model: Model, spec: str) -> None:
    with stepped_by_hand(llm):
        found = draws(llm._loaded.engine, model.prompt, spec)
    assert abs(z_score(found, model.joint())) < 3.3  # p > 0.001


@pytest.mark.slow
def test_accepting_what_is_likely_fails_the_test(
    llm: LLM, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted error: a drafted token is accepted if its probability exceeds 0.3, whatever was drawn."""
    accept = Request.accept

    def careless(self: Request, token: int, *others: Any) -> None:
        if self.draft and self.n_matched < len(self.draft):
            drafted = self.draft[self.n_matched]
            if model.after(*self.generated).get(drafted, 0) > 0.3:
                token = drafted
        accept(self, token, *others)

    monkeypatch.setattr(Request, "accept", careless)
    joint = model.joint()
    # Drafts that do not depend on the request's random numbers, as those of lookup.
    likely: dict[int, tuple[int, int]] = {}
    for first in model.after():
        second = max(model.after(first), key=model.after(first).__getitem__)
        third = max(model.after(first, second), key=model.after(first, second).__getitem__)
        likely[first] = second, third

    def draft(asks: Any) -> list[Draft]:
        return [Draft(likely[ask.request.generated[0]], "lookup") for ask in asks]

    engine = llm._loaded.engine
    lookup = next(drafter for drafter in engine.speculator._drafters if drafter.name == "lookup")
    monkeypatch.setattr(lookup, "find", lambda requests: None)  # so that `draft` is asked
    monkeypatch.setattr(lookup, "draft", draft)
    with stepped_by_hand(llm):
        found = draws(engine, model.prompt, "lookup")
    assert z_score(found, joint) > 6
