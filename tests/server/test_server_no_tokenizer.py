"""A server of a model file without a tokenizer: prompts and answers are ids, and text is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import RunningServer

from random_models import LLAMA, N_VOCAB

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path: Path = LLAMA.write(tmp_path_factory.mktemp("models") / "ids.gguf", has_tokenizer=False)
    with RunningServer(str(path), "-c", "256", "-t", "1", "--device", "cpu") as server:
        yield server.wait_until_ready()


def complete(server: RunningServer, **options: object) -> list[int]:
    body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "return_tokens": True, **options}
    tokens: list[int] = server.ok("/completion", body)["tokens"]
    return tokens


def test_ids_are_completed(server: RunningServer) -> None:
    tokens = complete(server)
    assert len(tokens) == 6
    assert all(0 <= token < N_VOCAB for token in tokens)


def test_a_bias_of_ids_works(server: RunningServer) -> None:
    assert set(complete(server, logit_bias=[[9, 1000.0]])) == {9}


def test_a_bias_of_an_id_that_the_model_lacks_does_not_end_the_server(server: RunningServer) -> None:
    reply = server.post("/completion", {"prompt": PROMPT, "n_predict": 2, "logit_bias": [[N_VOCAB + 9, 5.0]]})
    assert reply.status_code in (200, 400)
    assert len(complete(server)) == 6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "Hello"}),
        ("/tokenize", {"content": "Hello"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_text_is_refused_with_the_reason(server: RunningServer, path: str, body: dict[str, object]) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert "tokenizer" in reply.json()["error"]["message"]
