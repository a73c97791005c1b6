"""Experts and layers of single requests, on a server with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving import RunningServer

from motley import LLM
from motley.bundled import bundled_experts_path

PROMPT = "Once upon a time there was a little owl who lived in an old tree near the river."
GREEDY = {"prompt": PROMPT, "temperature": 0, "n_predict": 8}
KINDS: list[dict[str, Any]] = [
    {},
    {"n_expert_used": 1},
    {"n_expert_used": 16},
    {"n_layer_exit": 5, "n_expert_used": 2},
    {"cache_salt": "mine"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("slots")
    flags = ("-c", "512", "-np", "4", "-t", "1", "--slot-save-path", str(folder))
    with RunningServer(str(bundled_experts_path()), *flags) as running:
        yield running.wait_until_ready()


def n_cached(server: RunningServer, kind: dict[str, Any]) -> int:
    return int(server.ok("/completion", {**GREEDY, "id_slot": 0, **kind})["timings"]["cache_n"])


def test_requests_answer_as_those_of_the_library(server: RunningServer) -> None:
    with LLM(bundled_experts_path(), n_ctx=512) as llm:
        for kind in KINDS:
            expected = llm.generate(PROMPT, max_tokens=8, temperature=0, **kind).text
            assert server.ok("/completion", {**GREEDY, **kind})["content"] == expected


def test_embeddings_are_those_of_the_library(server: RunningServer) -> None:
    vectors = []
    with LLM(bundled_experts_path(), n_ctx=512) as llm:
        for kind in KINDS[:-1]:
            vectors.append(llm.embed(PROMPT, **kind))
            (found,) = server.ok("/v1/embeddings", {"input": PROMPT, **kind})["data"]
            np.testing.assert_allclose(found["embedding"], vectors[-1], atol=1e-4)
            (found,) = server.ok("/embedding", {"content": PROMPT, **kind})
            np.testing.assert_allclose(found["embedding"][0], vectors[-1], atol=1e-4)
    assert all(np.abs(vectors[0] - other).max() > 1e-2 for other in vectors[1:])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"n_expert_used": 17}, "n_expert_used must be an integer from 1 to 16"),
        ({"n_layer_exit": 0}, "n_layer_exit must be an integer from 1 to 6"),
        ({"n_layer_exit": "2"}, "n_layer_exit must be an integer"),
    ],
)
def test_embeddings_of_impossible_numbers_are_refused(
    server: RunningServer, kind: dict[str, Any], message: str
) -> None:
    reply = server.post("/v1/embeddings", {"input": PROMPT, **kind})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_an_erased_slot_leaves_nothing_of_its_last_request(server: RunningServer) -> None:
    for kind in KINDS:
        n_cached(server, kind)
        assert n_cached(server, kind) > 0
        assert server.ok("/slots/0?action=erase", {})["n_erased"] > 0
        assert n_cached(server, kind) == 0


def test_a_slot_whose_request_was_refused_can_be_erased(server: RunningServer) -> None:
    assert server.post("/completion", {**GREEDY, "id_slot": 0, "n_expert_used": 17}).status_code == 400
    server.ok("/slots/0?action=erase", {})


def test_a_session_holds_the_usual_cache_of_a_slot_with_another_effort(
    server: RunningServer,
) -> None:
    server.ok("/slots/0?action=erase", {})
    n_cached(server, {"n_layer_exit": 2})
    server.ok("/slots/0?action=save", {"filename": "a"})
    server.ok("/slots/0?action=restore", {"filename": "a"})
    assert n_cached(server, {}) > 0
    assert server.ok("/slots/0?action=erase", {})["n_erased"] > 0
