"""Real clients talk to the server: openai (sync and async), anthropic, and LangChain and LiteLLM where installed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from serving import RunningServer

openai = pytest.importorskip("openai", reason="pip install openai")
from pydantic import BaseModel  # noqa: E402  openai brings it

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Pet(BaseModel):
    """A schema for structured answers."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)


def test_openai_chats(client: Any) -> None:
    reply = client.chat.completions.create(model="any", messages=HELLO, max_tokens=8, temperature=0)
    text = reply.choices[0].message.content
    stream = client.chat.completions.create(
        model="any",
        messages=HELLO,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens


def test_openai_calls_tools_and_takes_their_results(client: Any) -> None:
    reply = client.chat.completions.create(
        model="any", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=100, seed=1
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = client.chat.completions.create(
        model="any", messages=[*HELLO, message, result], tools=[TOOL], tool_choice="none", max_tokens=4
    )
    assert after.choices[0].message.tool_calls is None


def test_openais_stream_helper_follows_a_call(client: Any) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model="any", messages=HELLO, tools=[TOOL], tool_choice=choice, max_tokens=100, seed=2
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_openai_parses_structured_answers(client: Any) -> None:
    reply = client.chat.completions.parse(
        model="any", messages=HELLO, response_format=Pet, max_tokens=200, seed=3
    )
    assert isinstance(reply.choices[0].message.parsed, Pet)


def test_openai_embeddings_in_both_encodings(client: Any) -> None:
    as_base64 = client.embeddings.create(model="any", input=["A red kite", "The sea"]).data
    as_floats = client.embeddings.create(model="any", input="A red kite", encoding_format="float").data
    assert len(as_base64) == 2
    assert as_base64[0].embedding == pytest.approx(as_floats[0].embedding)
    assert sum(x * x for x in as_base64[1].embedding) == pytest.approx(1, abs=1e-4)


def test_openai_responses_with_a_tool(client: Any) -> None:
    flat = {"type": "function", "name": "get_weather", "parameters": TOOL["function"]["parameters"]}
    reply = client.responses.create(
        model="any", input="Hello", tools=[flat], tool_choice="required", max_output_tokens=100
    )
    (call,) = [item for item in reply.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "Hello"}, *[item.model_dump() for item in reply.output], result]
    after = client.responses.create(model="any", input=items, max_output_tokens=4)
    assert after.output_text


def test_openais_errors_are_told_apart(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.completions.create(model="any", prompt=[5] * 9999)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such/model")


def test_openai_from_coroutines(server: RunningServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(model="any", messages=HELLO, max_tokens=6, temperature=0)
                    for _ in range(6)
                )
            )
            return [reply.choices[0].message.content for reply in replies]

    assert len(set(asyncio.run(ask()))) == 1


def test_anthropic_whole_streamed_and_with_tools(server: RunningServer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.Anthropic(api_key="none", base_url=server.url, max_retries=0)
    greedy: Any = {"model": "any", "max_tokens": 8, "system": "Be kind.", "extra_body": {"temperature": 0}}
    whole = client.messages.create(messages=HELLO, **greedy)
    with client.messages.stream(messages=HELLO, **greedy) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    tool = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    options: Any = {"model": "any", "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 100}
    called = client.messages.create(messages=HELLO, **options)
    assert called.stop_reason == "tool_use"
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert use.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turn: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(messages=turn, model="any", max_tokens=4).content
    assert client.messages.count_tokens(model="any", messages=turn).input_tokens > 10


def test_langchain(server: RunningServer) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    chat = langchain.ChatOpenAI(
        model="any", api_key="none", base_url=f"{server.url}/v1", max_tokens=32, temperature=0, max_retries=0
    )
    text = chat.invoke("Hello").content
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == text
    bound = chat.bind_tools([TOOL], tool_choice="required")
    assert bound.invoke("Hello").tool_calls[0]["args"]["city"] in ("Paris", "Rome")


def test_litellm(server: RunningServer) -> None:
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    options: Any = {
        "model": "openai/any",
        "api_key": "none",
        "api_base": f"{server.url}/v1",
        "max_tokens": 8,
        "temperature": 0,
        "num_retries": 0,
    }
    text = litellm.completion(messages=HELLO, **options).choices[0].message.content
    chunks = litellm.completion(messages=HELLO, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a " * 3000}], **options)
