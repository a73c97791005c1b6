"""Small models with experts as a whole on a real GPU: gpt-oss (sinks, biases, MXFP4), GLM (shared expert, groups,
sigmoid), Qwen3-VL. Prompts of several lengths and decode, one device and two, against the reference backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from expert_models import MODELS, PROMPTS, ExpertModel, Found, check_answers, check_logits, logits_of

from motley import LLM

CREWS: Mapping[str, dict[str, Any]] = {
    "one": {"devices": "cuda:0"},
    "two": {"devices": "cuda:0,cuda:0", "split_mode": "tensor"},
    "two, whole experts": {"devices": "cuda:0,cuda:0", "split_mode": "tensor", "split_experts": "whole"},
}
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_parallel": 8, "prefix_cache": False}
Load = Callable[..., LLM]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.architecture)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: ExpertModel = request.param
    return model.write(tmp_path_factory.mktemp("models") / f"{model.architecture}.gguf")


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def expected(path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, dict[int, Found], str]]:
    """The reference, its logits by length of the prompt, and the type of its cache."""
    kind: str = request.param
    types: dict[str, Any] = {"cache_type_k": kind, "cache_type_v": kind}
    with LLM(path, devices="cpu", backend="reference", **OPTIONS, **types) as llm:
        yield llm, {n: logits_of(llm, n) for n in PROMPTS}, kind


@pytest.mark.parametrize("crew", CREWS)
def test_logits_and_greedy_answers_are_the_references(
    path: Path,
    expected: tuple[LLM, dict[int, Found], str],
    crew: str,
    record_property: Callable[[str, object], None],
) -> None:
    reference, logits, kind = expected
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(path, cache_type_k=kind, cache_type_v=kind, **OPTIONS, **CREWS[crew]))
        llm.finish_compiling()
        assert not llm.warm_up.failures
        found = {n: logits_of(llm, n) for n in PROMPTS}
        distance = check_logits(found, logits)
        replayed = {n: logits_of(llm, n) for n in PROMPTS[-2:]}
        check_logits(replayed, logits)
        answers = check_answers(llm, reference, (3, 9, 30, 70))
    record_property("distance", distance)
    print(f"{path.stem}, {kind}, {crew}: {distance}; {answers}")
