"""What is refused, closed or forgotten leaves the engine sound."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM
from motley.errors import CacheError, DeviceError, MotleyError, RequestError

PROMPT = "Once upon a time there was a little girl who had a"


@pytest.fixture(scope="module")
def path(bundled: Path) -> Path:
    return bundled


@pytest.fixture
def llm(path: Path) -> LLM:
    return LLM(path, n_ctx=128, n_parallel=4)


def test_a_bad_prompt_among_others_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([[1, 2], [10**6]])
    assert llm.kv_stats().use.n_sequences == 0
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate("Once", logit_bias={10**6: 1.0})


def test_a_forgotten_stream_ends(llm: LLM) -> None:
    with stepped_by_hand(llm) as step:
        stream = llm.stream(PROMPT, max_tokens=100, temperature=0)
        step(2)
        assert llm.kv_stats().use.n_sequences == 1
        del stream
        gc.collect()
        assert llm.kv_stats().use.n_sequences == 0


def test_a_forgotten_model_goes_with_its_threads(path: Path) -> None:
    gc.collect()  # of models that earlier tests forgot
    before = threading.active_count()
    llm = LLM(path, n_ctx=64, devices="cpu,cpu", split_mode="tensor")
    llm.generate("Once", max_tokens=1)
    runner = weakref.ref(llm._loaded.runner)
    del llm
    gc.collect()
    assert runner() is None
    assert threading.active_count() == before


def test_closing_while_streaming_ends_the_stream_with_an_error(path: Path) -> None:
    llm = LLM(path, n_ctx=64)
    with stepped_by_hand(llm) as step:
        stream = llm.stream("Once", max_tokens=20)
        step(2)
        llm.close()
    with pytest.raises(RequestError, match="closed"):
        list(stream)
    with pytest.raises(RequestError, match="closed"):
        llm.memory()


def test_a_raw_sequence_that_takes_all_room_is_named(path: Path) -> None:
    with LLM(path, n_ctx=64, n_parallel=1) as llm:
        with llm.raw_sequence() as sequence:
            sequence.feed([1] * 60, n_outputs=1)
            with pytest.raises(CacheError, match="close raw sequences"):
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
        "motley.runtime.worker.load_weights", lambda *a, **k: pytest.fail("something was loaded")
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
    with LLM(path, n_ctx=8192, n_parallel=1) as llm:
        assert any("trained with 4096" in notice for notice in llm.notices)


def test_a_stream_can_be_left_within_its_prompt(path: Path) -> None:
    """Ctrl-C does not wait for the first token of a long prompt."""
    with LLM(path, n_ctx=256, n_batch=16) as llm:
        stream = llm.stream([5] * 200, max_tokens=20)
        assert list(stream.until(lambda: True)) == []
        stream.close()
        assert stream.completion.tokens == ()
        assert stream.completion.finish_reason == "cancelled"
        assert llm.kv_stats().use.n_sequences == 0
