"""What people pass to `LLM`: prompts, parameters and paths of all kinds."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley import LLM, SamplingParams
from motley.bundled import bundled_model_path
from motley.errors import ConfigError, MotleyError, RequestError


@pytest.fixture(scope="module")
def llm(bundled: Path) -> Iterator[LLM]:
    with LLM(bundled, n_ctx=128, n_parallel=4) as llm:
        yield llm


@pytest.mark.parametrize("name", [(), (None,), ("bundled",)], ids=str)
def test_the_bundled_model_needs_no_path(name: tuple[Any, ...]) -> None:
    with LLM(*name, n_ctx=32) as llm:
        assert Path(llm.spec.path).name == bundled_model_path().name


@pytest.mark.parametrize("path", ["a\0b", "", 3, b"model.gguf", ["x"], {}], ids=repr)
def test_what_is_no_path_is_named(llm: LLM, path: Any) -> None:
    for call in (LLM, llm.load_session, lambda path: llm.save_session(path, "One")):
        with pytest.raises(MotleyError):
            call(path)


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], n=3, params=None) == []
    assert llm.generate([], params=[]) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), {"max_tokens": 3, "seed": 1}]
    assert [len(a.tokens) for a in llm.generate(["One", "Two"], params=params)] == [2, 3]
    assert len(llm.generate("One", params={"max_tokens": 2}).tokens) == 2
    assert len(llm.chat([{"role": "user", "content": "Hi"}], params={"max_tokens": 2}).tokens) <= 2


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        (b"One", None, "bytes"),
        (bytearray(b"One"), None, "bytearray"),
        (None, None, "NoneType"),
        (3.5, None, "float"),
        ({"One"}, None, "set"),
        ({"prompt": "One"}, None, "dict"),
        ([1, "two"], None, "list"),
        ([True], None, "list"),
        (["One", b"Two"], None, r"prompts\[1\]: .*bytes"),
        (["One", 3], None, r"prompts\[1\]: .*int"),
        (["One", [10**9]], None, r"prompts\[1\]: token id"),
        (["One", []], None, r"prompts\[1\]"),
        (["One"], [], "0 params for 1 prompts"),
        (["One"], [{"max_token": 1}], r"params\[0\]: unknown option 'max_token'"),
        (["One"], [3], r"params\[0\]"),
        ("One", [{}], "params is"),
        ("One", 3, "params is 3"),
        ("One", {"top_k": -1}, "top_k"),
    ],
    ids=str,
)
def test_wrong_prompts_and_parameters_are_named(llm: LLM, prompt: Any, params: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate(prompt, params=params)


def test_token_ids_of_numpy_are_a_prompt(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("Once upon")
    wanted = llm.generate(tokens, max_tokens=3, temperature=0).tokens
    assert llm.generate(np.array(tokens), max_tokens=3, temperature=0).tokens == wanted
    (answer,) = llm.generate([np.array(tokens)], max_tokens=3, temperature=0)
    assert answer.tokens == wanted


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_not_copied(llm: LLM, copying: Callable[[object], object]) -> None:
    with pytest.raises(ConfigError, match="cannot be pickled"):
        copying(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {40: 1e300}},
        {"logit_bias": {40: 1e300, 41: -1e300}},
        {"frequency_penalty": -1e300},
        {"presence_penalty": 1e300},
        {"repeat_penalty": 1e-300},
        {"repeat_penalty": 1e300},
    ],
    ids=str,
)
def test_enormous_numbers_do_not_overflow(llm: LLM, options: dict[str, Any]) -> None:
    for more in ({"temperature": 0}, {"seed": 1}, {"seed": 1, "temperature": 1e-30}):
        answer = llm.generate("One day", max_tokens=3, **options, **more)
        assert answer.finish_reason in ("length", "stop")
    if "logit_bias" in options:
        assert set(llm.generate("One", max_tokens=3, **options).tokens) == {40}


def in_a_child(llm: LLM, name: str, answers: Any) -> None:
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate("One", max_tokens=1),
        "list": lambda: llm.generate(["One"], max_tokens=1),
        "chat": lambda: llm.chat([{"role": "user", "content": "Hi"}], max_tokens=1),
        "stream": lambda: list(llm.stream("One", max_tokens=1)),
        "logits": lambda: llm.logits("One"),
        "async": lambda: asyncio.run(llm.agenerate("One", max_tokens=1)),
        "save": lambda: llm.save_session("never.bin", "One"),
        "load": lambda: llm.load_session("never.bin"),
        "figures": llm.kv_stats,
    }
    try:
        calls[name]()
    except BaseException as error:
        answers.put(f"{type(error).__name__}: {error}")
    else:
        answers.put("it worked")


@pytest.mark.parametrize(
    "name", ["generate", "list", "chat", "stream", "logits", "async", "save", "load", "figures"]
)
def test_everything_tells_a_forked_child_at_once(llm: LLM, name: str) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=in_a_child, args=(llm, name, answers))
    child.start()
    try:
        assert "RequestError: this process was forked after the model was loaded" in answers.get(timeout=60)
    finally:
        child.kill()
        child.join()
