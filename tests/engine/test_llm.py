"""`LLM` as people touch it, on the bundled model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM, MotleyError, SamplingParams
from motley.backends import Backend
from motley.errors import CacheError, ConfigError, RequestError


@pytest.fixture(scope="module")
def path(bundled: Path) -> Path:
    return bundled


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, n_ctx=256, n_parallel=4)


def test_generate_gives_text_tokens_reason_and_timings(llm: LLM) -> None:
    out = llm.generate("Once upon a time", max_tokens=12, temperature=0)
    assert " a " in out.text  # words, not noise
    assert len(out.tokens) == 12
    assert out.finish_reason == "length"
    assert out.timings.prompt_tokens == 5
    assert out.timings.new_tokens == 12
    assert llm.tokenizer.decode(out.tokens) == out.text


def test_streamed_pieces_add_up_to_the_answer(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", max_tokens=12, temperature=0)
    assert "".join(stream) == stream.completion.text
    assert stream.completion.text == llm.generate("Once upon a time", max_tokens=12, temperature=0).text


def test_many_prompts_at_once_equal_one_by_one(llm: LLM) -> None:
    prompts = ["Once upon a time", "The cat", "Tim and Sam", "One day", "Lily had a", "In the park"]
    together = llm.generate(prompts, max_tokens=10, temperature=0)
    assert [o.tokens for o in together] == [
        llm.generate(p, max_tokens=10, temperature=0).tokens for p in prompts
    ]


def test_logits_are_float32_and_agree_with_greedy_choice(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("Once upon a time")
    logits = llm.logits(tokens)
    assert logits.dtype == np.float32
    assert logits.shape == (5, 4096)
    assert int(logits[-1].argmax()) == llm.generate(tokens, max_tokens=1, temperature=0).tokens[0]


def test_logits_of_more_tokens_than_a_batch(path: Path) -> None:
    tokens = list(range(3, 103))
    with LLM(path, n_ctx=128, n_batch=17) as small, LLM(path, n_ctx=128) as large:
        np.testing.assert_allclose(small.logits(tokens), large.logits(tokens), atol=1e-4)


def test_a_seed_makes_sampling_repeatable(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=5, temperature=1.0)
    assert llm.generate("Once", params=params).tokens == llm.generate("Once", params=params).tokens
    others = {llm.generate("The", max_tokens=12, seed=s, temperature=3, min_p=0).tokens for s in range(4)}
    assert len(others) > 1


def test_stop_strings_end_the_answer_before_them(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", max_tokens=60, temperature=0).text
    out = llm.generate("Once upon a time", max_tokens=60, temperature=0, stop=("named",))
    assert out.finish_reason == "stop"
    assert out.text == whole.partition("named")[0] != whole


def test_chat_answers_with_the_plain_template(llm: LLM) -> None:
    out = llm.chat([{"role": "user", "content": "Tell me a story."}], max_tokens=5, temperature=0)
    assert len(out.tokens) == 5


def test_control_tokens_in_a_message_are_text_and_in_a_prompt_only_where_they_are_trusted(llm: LLM) -> None:
    text = "a<|eos|>b"
    n_parsed, n_plain = (len(llm.tokenizer.encode(text, parse_special=p)) for p in (True, False))
    assert n_plain > n_parsed
    for parse, n in ((True, n_parsed), (False, n_plain)):
        answer = llm.generate(text, max_tokens=1, parse_special=parse)
        assert answer.timings.prompt_tokens == n
        assert llm.generate([text], max_tokens=1, parse_special=parse)[0].timings.prompt_tokens == n
    message = llm.chat([{"role": "user", "content": text}], max_tokens=1)
    plain = llm.chat([{"role": "user", "content": text.replace("<", "[")}], max_tokens=1)
    assert message.timings.prompt_tokens >= plain.timings.prompt_tokens - 1


def test_closing_a_stream_cancels_the_request_and_keeps_the_model_usable(llm: LLM) -> None:
    with stepped_by_hand(llm) as step:
        stream = llm.stream("Once", max_tokens=100, temperature=0)
        step(2)
        with pytest.raises(RequestError, match="not complete"):
            _ = stream.completion
        stream.close()
        assert stream.completion.finish_reason == "cancelled"
    assert llm.generate("Once", max_tokens=2, temperature=0).finish_reason == "length"


def test_bad_requests_are_refused_and_the_model_lives_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="300 tokens, but the context holds 256"):
        llm.generate([1] * 300)
    with pytest.raises(RequestError, match="empty"):
        llm.logits([])
    with pytest.raises(RequestError, match="token id 4096"):
        llm.generate([1, 4096])
    with pytest.raises(RequestError, match="unknown option 'temprature'"):
        llm.generate("a", temprature=1)
    assert llm.generate("Once", max_tokens=1).finish_reason == "length"


def test_bad_options_are_refused(path: Path) -> None:
    with pytest.raises(TypeError, match="n_contxt"):
        LLM(path, n_contxt=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="n_ctx is 0"):
        LLM(path, n_ctx=0)
    with pytest.raises(ConfigError, match="n_threads is 100000"):
        LLM(path, n_threads=100_000)
    for limit in (
        {"kv_cache_tokens": 10**12},
        {"kv_cache_bytes": "900TiB"},
        {"n_parallel": 2**26, "n_ctx": 512},
    ):
        with pytest.raises(CacheError, match=r"the KV cache would take .* TiB, but this machine has"):
            LLM(path, **limit)  # type: ignore[arg-type]
        with pytest.raises(CacheError, match=r"the KV cache would have .* blocks of 32 tokens"):
            LLM(path, kv_cache_demand_paged=True, **limit)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown backend 'quantum'"):
        LLM(path, backend="quantum")
    with pytest.raises(ConfigError, match="q9"):
        LLM(path, cache_type_k="q9")
    with pytest.raises(MotleyError, match=r"missing\.gguf"):
        LLM(path.parent / "missing.gguf")


def test_a_closed_model_says_so(path: Path) -> None:
    with LLM(path, n_ctx=64) as llm:
        assert llm.generate("Once", max_tokens=1).tokens
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.generate("Once")


def test_progress_is_reported_in_bytes(path: Path) -> None:
    calls: list[tuple[int, int]] = []
    LLM(path, n_ctx=64, progress=lambda done, total: calls.append((done, total))).close()
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls)


def test_memory_is_given_by_purpose(llm: LLM) -> None:
    llm.generate("Once", max_tokens=1)  # activations take memory at the first step
    memory = llm.memory()
    assert memory["weights"] > 0
    # Sequences, tokens, layers, heads, K and V, dim, f16.
    assert memory["kv_cache"] == 4 * 256 * 8 * 4 * 2 * 64 * 2
    assert memory["activations"] > 0


@pytest.mark.parametrize("prompt", [3, None, [1.5], [[1], 3], ["Once", None]])
def test_a_prompt_is_text_or_token_ids(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="text or a list of token ids"):
        llm.generate(prompt, max_tokens=1)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", "messages must be a list"),
        ({"role": "user", "content": "hi"}, "messages must be a list"),
        ([3], r"messages\[0\] is not an object"),
        ([{"content": "hi"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 5}], "neither text nor a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image input"),
    ],
)
def test_messages_that_no_template_reads_are_refused(llm: LLM, messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.chat(messages, max_tokens=1)


def test_parts_of_a_message_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]
    whole, split = (
        llm.chat([{"role": "user", "content": content}], max_tokens=3, temperature=0)
        for content in ("Once upon", parts)
    )
    assert split.text == whole.text
    assert split.timings.prompt_tokens == whole.timings.prompt_tokens


def test_formats_that_a_device_has_to_unpack_are_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("no packed kernel" in notice for notice in llm.notices)
    monkeypatch.setattr(Backend, "unpacks", lambda self, form: form in ("Q8_0", "Q4_K"))
    with LLM(llm.spec.path, n_ctx=64) as other:
        assert (
            "Q8_0 weights have no packed kernel on cpu: they are unpacked to 16 bits a value" in other.notices
        )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list threads")
def test_a_crew_has_the_same_threads_for_batches_of_every_shape(llm: LLM) -> None:
    with LLM(llm.spec.path, n_ctx=64, devices="cpu,cpu,cpu", split_mode="tensor") as crew:
        crew.logits([1])
        n_threads = len(os.listdir("/proc/self/task"))
        for n in range(2, 12):
            crew.logits([1] * n)
        assert len(os.listdir("/proc/self/task")) == n_threads
