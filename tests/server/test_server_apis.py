"""The other APIs: Anthropic's, Responses, llama-server's own."""

from __future__ import annotations

from typing import Any

import pytest
from serving import RunningServer

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_messages_are_the_chat_of_the_same_words(server: RunningServer) -> None:
    chat = server.ok("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8, **GREEDY})
    message = server.ok("/v1/messages", {"messages": HELLO, "max_tokens": 8, **GREEDY})
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 8
    used = message["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_streamed_messages_add_up(server: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 8, **GREEDY}
    whole = server.ok("/v1/messages", body)
    events = list(server.events("/v1/messages", body))
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == whole["content"][0]["text"]


def test_the_nonce_of_claude_code_is_dropped(server: RunningServer) -> None:
    def count(system: Any) -> int:
        return int(
            server.ok("/v1/messages/count_tokens", {"messages": HELLO, "system": system})["input_tokens"]
        )

    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1234"},
        {"type": "text", "text": "Be kind."},
    ]
    assert count(blocks) == count("Be kind.")


def test_results_of_tools_become_messages_of_their_own(server: RunningServer) -> None:
    call = {"type": "tool_use", "id": "a", "name": "read", "input": {"file": "x"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "the file"}]}
    messages = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    server.ok("/v1/messages", {"messages": messages, "max_tokens": 2})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_images_are_refused_by_name(server: RunningServer, path: str) -> None:
    part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    reply = server.post(path, {"max_tokens": 2, "messages": [{"role": "user", "content": [part]}]})
    assert reply.status_code == 400
    assert "image input is not supported" in reply.json()["error"]["message"]


def test_responses_whole_and_streamed(server: RunningServer) -> None:
    body = {"input": "Hello", "max_output_tokens": 8, **GREEDY}
    whole = server.ok("/v1/responses", body)
    text = whole["output"][0]["content"][0]["text"]
    events = list(server.events("/v1/responses", body))
    assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == text
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    last = events[-1][1]["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert last["usage"]["output_tokens"] == 8
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}


def test_responses_keep_nothing(server: RunningServer) -> None:
    assert server.post("/v1/responses", {"input": "Hi", "previous_response_id": "resp_1"}).status_code == 501


def test_tokens_there_and_back(server: RunningServer) -> None:
    text = "What is the capital of France? 媽"
    tokens = server.ok("/tokenize", {"content": text})["tokens"]
    assert server.ok("/detokenize", {"tokens": tokens})["content"].strip() == text
    pieces = server.ok("/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    whole = b"".join(
        p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces
    )
    assert whole.decode().strip() == text


def test_a_schema_is_kept(server: RunningServer) -> None:
    import json

    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    body = {"messages": HELLO, "response_format": schema, "max_tokens": 200, "seed": 3}
    answer = json.loads(server.ok("/v1/chat/completions", body)["choices"][0]["message"]["content"])
    assert set(answer) == {"city", "days"}
    assert answer["days"] <= 9


@pytest.mark.parametrize(
    "bad",
    [
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_object", "schema": 123}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}},
        {"grammar": "root ::= this is (not valid GBNF"},
        {"json_schema": {"type": "array", "minItems": 10**9}},
    ],
)
def test_bad_schemas_and_grammars_are_the_clients_errors(server: RunningServer, bad: dict[str, Any]) -> None:
    reply = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **bad})
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize(
    ("effort", "said"),
    [
        ({"n_layer_exit": 0}, "n_layer_exit must be an integer from 1 to 8"),
        ({"n_layer_exit": 9}, "n_layer_exit must be an integer from 1 to 8"),
        ({"n_layer_exit": 2.5}, "n_layer_exit must be an integer"),
        ({"n_layer_exit": True}, "n_layer_exit must be an integer"),
        ({"n_expert_used": 0}, "the model has no experts"),
    ],
)
def test_impossible_layers_and_experts_are_refused_with_the_range(
    server: RunningServer, effort: dict[str, Any], said: str
) -> None:
    reply = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **effort})
    assert reply.status_code == 400, reply.text
    assert said in reply.json()["error"]["message"]


def test_logprobs_of_a_chat(server: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, **GREEDY}
    choice = server.ok("/v1/chat/completions", body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in entries)
    streamed = [
        entry
        for chunk in server.stream("/v1/chat/completions", body)
        for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", [])
    ]
    assert [entry["id"] for entry in streamed] == [entry["id"] for entry in entries]


def test_a_forced_call_streams_what_it_returns(server: RunningServer) -> None:
    import json

    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "seed": 5}
    choice = server.ok("/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
    arguments, names = "", []
    for chunk in server.stream("/v1/chat/completions", body):
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            assert delta["index"] == 0
            arguments += delta["function"].get("arguments", "")
            names += [delta["function"]["name"]] if "name" in delta["function"] else []
    assert (names, arguments) == (["weather"], call["function"]["arguments"])


def test_embeddings_are_counted(server: RunningServer) -> None:
    def steps() -> float:
        text = server.get("/metrics").text
        return float(
            next(line for line in text.splitlines() if line.startswith("llamacpp:n_decode_total")).split()[1]
        )

    before = steps()
    server.ok("/v1/embeddings", {"input": ["one", "two"]})
    assert steps() >= before + 2
