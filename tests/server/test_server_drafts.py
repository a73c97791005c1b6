"""Drafts on a running server: chosen by request, refused where they cannot be, and shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import RunningServer

from motley.bundled import bundled_draft_path

PROMPT = "The dog saw a cat. The cat saw a dog. The dog saw"
QUESTION = {"prompt": PROMPT, "n_predict": 40, "seed": 1}
SPEC = "grammar,lookup,draft"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    path = str(bundled_draft_path())
    with RunningServer(path, "-c", "512", "-t", "1", "-md", path, "--draft-min", "2") as running:
        yield running.wait_until_ready()


@pytest.mark.parametrize(
    "kind", [{}, {"speculative": "lookup", "draft_max": 3}, {"speculative": "exit,lookahead,draft"}]
)
def test_answers_are_those_without_drafts(server: RunningServer, kind: dict[str, Any]) -> None:
    plain = server.ok("/completion", {**QUESTION, "speculative": "off"})
    assert server.ok("/completion", {**QUESTION, **kind})["content"] == plain["content"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ({"speculative": "guess"}, "there is no drafter 'guess'"),
        ({"speculative": "mtp"}, "no multi-token prediction layer"),
        ({"speculative": ["lookup"]}, "speculative must be a string"),
        ({"draft_max": 64}, "draft_max must be an integer from 1 to 63"),
        ({"draft_max": 1}, "drafts have at least 2 tokens"),
    ],
)
def test_drafts_that_cannot_be_are_refused(server: RunningServer, kind: dict[str, Any], why: str) -> None:
    for path, question in (("/completion", QUESTION), ("/v1/completions", {"prompt": PROMPT})):
        reply = server.post(path, {**question, **kind})
        assert reply.status_code == 400
        assert why in reply.json()["error"]["message"]


def test_drafters_are_shown(server: RunningServer) -> None:
    assert all(slot["speculative"] for slot in server.get("/slots").json())
    shown = server.get("/props").json()["default_generation_settings"]["params"]
    assert shown["speculative.types"] == SPEC
    for spec, types in ((None, SPEC), ("lookup", "lookup"), ("off", "none")):
        settings = server.ok("/completion", {**QUESTION, "speculative": spec})["generation_settings"]
        assert settings["speculative.types"] == types
