"""The first path: health, models, completions and chats, streamed and not; the end."""

from __future__ import annotations

import subprocess
import sys

import pytest
from serving import RunningServer

from motley import LLM
from motley.bundled import bundled_model_path

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def expected() -> str:
    """What the library answers to PROMPT."""
    with LLM(bundled_model_path(), n_ctx=512, n_threads=1) as llm:
        return llm.generate(PROMPT, max_tokens=16, temperature=0).text


def test_the_front_imports_no_torch() -> None:
    code = "import sys, motley.cli.serve, motley.server.supervisor, motley.server.api; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_health_and_models(server: RunningServer) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    (model,) = server.get("/v1/models").json()["data"]
    assert model["id"] == bundled_model_path().name
    assert model["meta"]["n_ctx"] == 512


def test_completions_are_those_of_the_library(server: RunningServer, expected: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, **GREEDY}
    whole = server.ok("/v1/completions", body)
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 16
    pieces = server.stream("/v1/completions", body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    assert server.ok("/completion", {"prompt": PROMPT, "n_predict": 16, **GREEDY})["content"] == expected


def test_a_streamed_chat_is_the_whole_one(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, **GREEDY}
    whole = server.ok("/v1/chat/completions", body)
    chunks = server.stream("/v1/chat/completions", body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_comes_last_and_only_if_asked_for(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **GREEDY}
    assert all("usage" not in chunk for chunk in server.stream("/v1/chat/completions", body))
    chunks = server.stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_choices_differ_and_share_the_prompt(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 24, "n": 3, "seed": 7}
    reply = server.ok("/v1/chat/completions", body)
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert len(set(texts)) > 1
    assert reply["usage"]["completion_tokens"] == 72
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    server: RunningServer,
) -> None:
    reply = server.post("/v1/completions", {"prompt": [5] * 600, "stream": True})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert "exceeds the available context size" in error["message"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == (
        "exceed_context_size_error",
        600,
        512,
    )


def test_null_means_absent(server: RunningServer) -> None:
    fields = (
        "max_tokens",
        "stop",
        "tools",
        "tool_choice",
        "seed",
        "logit_bias",
        "n",
        "stream",
        "logprobs",
        "user",
    )
    body = {"messages": [{"role": "user", "content": "Hi", "name": None}], "max_completion_tokens": 2}
    server.ok("/v1/chat/completions", body | dict.fromkeys(fields))


@pytest.mark.slow
def test_sigterm_ends_both_processes() -> None:
    with RunningServer("-c", "64", "-t", "1") as running:
        running.wait_until_ready()
        assert running.stop() == 0
