"""Sampling on a real GPU, and kernels that are compiled ahead: what the interpreter cannot say."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from draws import follow, probabilities

from motley import LLM
from motley.engine.choosing import ChoiceRow, GpuChooser, HostChooser
from motley.engine.sampling import SamplingParams, build_sampler
from motley.errors import RequestError

Load = Callable[..., LLM]
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    OFF,
    {},
    OFF | {"top_k": 7, "top_p": 0.7},
    OFF | {"top_k": 50, "typical_p": 0.6, "top_p": 0.9, "min_p": 0.01},
    OFF | {"top_k": 2000},
    OFF | {"top_p": 0.4},
    OFF | {"top_p": 0.999},
    OFF | {"min_p": 0.02, "top_p": 0.8, "temperature": 1.7},
    OFF | {"typical_p": 0.7, "top_p": 0.6},
    {"repeat_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"logit_bias": {5: 9.0, 7: -math.inf}},
]


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
def test_it_chooses_what_the_cpu_chooses(spread: float) -> None:
    """Of rows of a real vocabulary's size. Where two scores are closer than float32 can tell they may differ."""
    n_vocab, rows = 128_256, []
    for i in range(96):
        sampler = build_sampler(SamplingParams(seed=i, **SETTINGS[i % len(SETTINGS)]))
        rows.append(ChoiceRow(sampler, [3, 5, 5, 100 + i, 7], i))
    generator = torch.Generator().manual_seed(int(spread * 10))
    logits = spread * torch.randn(96, n_vocab, generator=generator)
    expected = HostChooser().choose(logits.clone(), rows).tokens()
    found = GpuChooser(torch.device("cuda:0")).choose(logits.cuda(), rows).tokens()
    different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
    assert len(different) <= 1, different


@pytest.mark.parametrize(("temperature", "is_right"), [(0.9, True), (1.0, False)])
@pytest.mark.parametrize("setting", [OFF, {"top_k": 40, "top_p": 1.0, "min_p": 0.0}])
def test_draws_follow_the_distribution(setting: dict[str, Any], temperature: float, is_right: bool) -> None:
    row, n = torch.linspace(-1, 2, 30), 20_000
    sampler = build_sampler(SamplingParams(seed=3, **setting | {"temperature": 0.9}))
    chooser = GpuChooser(torch.device("cuda:0"))
    rows = [ChoiceRow(sampler, (), index) for index in range(n)]
    drawn = chooser.choose(row.repeat(n, 1).cuda(), rows).tokens()
    assert follow(drawn, probabilities(row.double().numpy(), temperature)) == is_right


def test_a_broken_row_is_an_error_of_its_own() -> None:
    logits = torch.zeros(3, 5000, device="cuda:0")
    logits[1, 4999] = math.nan
    rows = [ChoiceRow(build_sampler(SamplingParams(seed=1)), (), 0) for _ in range(3)]
    first, error, last = GpuChooser(torch.device("cuda:0")).choose(logits, rows).tokens()
    assert isinstance(error, RequestError)
    assert isinstance(first, int)
    assert isinstance(last, int)


def test_a_seeded_answer_is_repeated_and_the_step_ahead_changes_nothing(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(3, 40))
    llm = load()
    answers = [llm.generate(prompt, max_tokens=60, seed=4, ignore_eos=True).tokens for _ in range(2)]
    monkeypatch.setattr(type(llm._loaded.runner), "can_chain", False)
    answers.append(llm.generate(prompt, max_tokens=60, seed=4, ignore_eos=True).tokens)
    assert answers[0] == answers[1] == answers[2]


def test_nothing_is_compiled_while_requests_run(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    llm = load(n_parallel=32, n_batch=256, cache_type_k="q8_0", cache_type_v="q8_0")
    assert not llm.warm_up.failures
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.compilation,
        "listener",
        lambda *, src, cache_hit, **_: cache_hit or compiled.append(f"{src.name} {src.constants}"),
    )
    for n in (1, 3, 8, 17, 32):
        llm.generate([list(range(3, 20 + i)) for i in range(n)], max_tokens=6, seed=1, repeat_penalty=1.1)
    llm.generate(list(range(3, 400)), max_tokens=3)
    assert not compiled, compiled
