"""Things go wrong, and nobody else's answer is lost for it."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from motley import LLM
from motley.engine import engine
from motley.engine.sampling import Sampler
from motley.errors import CacheError, DeviceError, MotleyError, RequestError

PROMPT = "Once upon a time there was a little girl who had a"


@pytest.fixture(scope="module")
def path(shared: Path) -> Path:
    return shared / "data" / "models" / "stories260K" / "stories260K.gguf"


@pytest.fixture
def llm(path: Path) -> LLM:
    return LLM(path, n_ctx=128, n_parallel=4)


def fail_once(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of a method fails."""
    method, calls = getattr(owner, name), []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no memory for a plan")
        return method(*arguments)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("when", ["placing", "running", "foreseeing", "choosing"])
def test_a_failed_step_leaves_the_other_requests_and_the_prefix_cache_sound(
    llm: LLM, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(PROMPT, max_tokens=20, temperature=0).tokens
    survivor = llm.stream(PROMPT, max_tokens=20, temperature=0)  # a partial block is to be copied for it
    owner, name = {
        "placing": (llm._runner, "place"),
        "running": (llm._runner, "run"),
        "foreseeing": (llm._engine._scheduler, "foresee"),
        "choosing": (engine, "shortlist"),
    }[when]
    fail_once(owner, name, monkeypatch)
    with pytest.raises(MemoryError):
        llm.generate(PROMPT, max_tokens=20, temperature=0)
    assert survivor.finish().tokens == expected
    assert llm.generate(PROMPT, max_tokens=20, temperature=0).tokens == expected
    llm._cache.check_integrity()


def test_a_sampler_s_error_is_its_own_request_s(llm: LLM) -> None:
    class Broken(Sampler):
        def pick(self, found: Any) -> int:
            raise RequestError("the logits are not numbers")

    good = llm.stream(PROMPT, max_tokens=8, temperature=0)
    bad = llm.stream("The cat", max_tokens=8, temperature=0)
    sampler = bad._request.sampler
    bad._request.sampler = Broken(sampler.params, sampler.chain, sampler.generator)
    assert len(good.finish().tokens) == 8
    with pytest.raises(RequestError, match="not numbers"):
        list(bad)
    with pytest.raises(RequestError, match="not numbers"):
        _ = bad.completion


def test_a_bad_prompt_among_others_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([[1, 2], [10**6]])
    assert llm.kv_stats().use.n_sequences == 0
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate("Once", logit_bias={10**6: 1.0})


def test_a_forgotten_stream_ends(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=100, temperature=0)
    next(stream)
    del stream
    gc.collect()
    assert llm.kv_stats().use.n_sequences == 0


def test_a_forgotten_model_goes_with_its_threads(path: Path) -> None:
    gc.collect()  # of models that earlier tests forgot
    before = threading.active_count()
    llm = LLM(path, n_ctx=64, devices="cpu,cpu", split_mode="tensor")
    llm.generate("Once", max_tokens=1)
    runner = weakref.ref(llm._runner)
    del llm
    gc.collect()
    assert runner() is None
    assert threading.active_count() == before


def test_closing_while_streaming_ends_the_stream_with_an_error(path: Path) -> None:
    llm = LLM(path, n_ctx=64)
    stream = llm.stream("Once", max_tokens=20)
    next(stream)
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        list(stream)
    with pytest.raises(RequestError, match="closed"):
        llm.memory()


def test_a_bare_sequence_that_takes_all_room_is_named(path: Path) -> None:
    with LLM(path, n_ctx=64, n_parallel=1) as llm:
        with llm.bare_sequence() as sequence:
            sequence.feed([1] * 60, n_outputs=1)
            with pytest.raises(CacheError, match="bare sequences"):
                llm.generate("Once upon a time", max_tokens=5)
            with pytest.raises(RequestError, match=r"no room .* after 60"):
                sequence.feed([1] * 10)
            for wrong in ([], [-5], [2_000_000_000]):
                with pytest.raises(RequestError, match="token ids"):
                    sequence.feed(wrong)
            with pytest.raises(RequestError, match="token ids"):
                sequence.follow(-1)
        sequence.close()
        assert llm.generate("Once upon a time", max_tokens=5).tokens


def test_a_budget_that_is_too_small_is_refused_before_loading(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "motley.runtime.runner.load_weights", lambda *a, **k: pytest.fail("something was loaded")
    )
    for budgets, device in ((("1GiB", "100KiB"), "cpu#1"), (("100KiB", "1GiB"), "cpu#0")):
        with pytest.raises(DeviceError, match=rf"device {device} needs .* [KM]iB are missing") as error:
            LLM(path, devices="cpu,cpu", split_mode="tensor", tensor_split=(1, 1), device_memory=budgets)
        assert "smaller share" in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 10**11},
        {"n_ctx": True},
        {"kv_block_size": 3},
        {"kv_block_size": "16"},
        {"device_memory": "0.1"},
        {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": "1e99999999,1"},
    ],
    ids=str,
)
def test_absurd_options_are_refused_at_once(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(MotleyError):
        LLM(path, **options)


def test_a_context_beyond_the_model_s_is_noticed(path: Path) -> None:
    with LLM(path, n_ctx=512) as llm:
        assert any("trained with 128" in notice for notice in llm.notices)


def test_a_stream_can_be_left_within_its_prompt(path: Path) -> None:
    """Whoever presses Ctrl-C does not wait for the first token of a long prompt."""
    with LLM(path, n_ctx=256, n_batch=16) as llm:
        stream = llm.stream([5] * 200, max_tokens=20)
        asked = iter([False, False, True])
        assert list(stream.until(lambda: next(asked))) == []
        stream.close()
        assert stream.completion.tokens == ()
        assert stream.completion.finish_reason == "cancelled"
        assert llm.kv_stats().use.n_sequences == 0
