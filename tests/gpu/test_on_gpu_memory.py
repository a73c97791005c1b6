"""A GPU's memory: the cache takes what it uses and gives it back, and what does not fit is refused or survived."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from motley import LLM
from motley.errors import MotleyError

PROMPT = list(range(3, 260)) * 8
MIB = 2**20

Load = Callable[..., LLM]


def resident(llm: LLM) -> int:
    return sum(device.resident for device in llm.kv_stats().devices)


def test_a_demand_paged_cache_takes_memory_and_gives_it_back(load: Load) -> None:
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")
    llm = load(n_ctx=8192, kv_cache_demand_paged=True)
    idle = resident(llm)
    for _ in range(2):  # loads kernels, makes plans and captures them: graphs keep their memory
        llm.generate(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True)
    llm.memory()  # the engine has given back what that request held
    torch.cuda.empty_cache()
    n_free = torch.cuda.mem_get_info()[0]
    stream = llm.stream(PROMPT, max_tokens=2000, temperature=0.0, ignore_eos=True)
    next(stream)
    torch.cuda.empty_cache()
    taken = resident(llm) - idle
    assert taken > 0
    assert n_free - torch.cuda.mem_get_info()[0] >= taken  # the driver says so, too
    stream.close()
    _ = stream.completion  # waits until it has ended
    torch.cuda.empty_cache()
    assert resident(llm) == idle
    assert n_free - torch.cuda.mem_get_info()[0] < taken


def test_demand_paging_changes_no_answer(load: Load) -> None:
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")
    paged, plain = (load(n_ctx=4096, kv_cache_demand_paged=is_paged) for is_paged in (True, False))
    for _ in range(2):  # the second time in memory that was given back
        a, b = (llm.generate(PROMPT, max_tokens=24, temperature=0.0) for llm in (paged, plain))
        assert a.tokens == b.tokens


def test_a_model_that_does_not_fit_is_refused_with_numbers(load: Load) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # what torch keeps of earlier tests is free for a model, too
    n_free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(n_free - 300 * MIB, dtype=torch.uint8, device="cuda:0")
    try:
        with pytest.raises(MotleyError, match=r"MiB"):
            load(n_ctx=4096, n_batch=2048, kv_cache_tokens=2**20)
    finally:
        del hog
        torch.cuda.empty_cache()
    assert load().generate("Once", max_tokens=2).tokens


def test_a_request_that_runs_out_of_memory_fails_and_the_next_is_answered(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load()
    expected = llm.generate("Once upon a time", max_tokens=8, temperature=0.0).tokens
    linear = torch.nn.functional.linear

    def hungry(*arguments: torch.Tensor) -> torch.Tensor:
        torch.empty(2**44, dtype=torch.uint8, device="cuda:0")
        return linear(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", hungry)
        with pytest.raises(MotleyError, match="out of memory"):
            llm.generate(PROMPT[:400], max_tokens=8, temperature=0.0)
    assert llm.generate("Once upon a time", max_tokens=8, temperature=0.0).tokens == expected


def test_the_first_prompt_of_the_engines_thread_is_captured(load: Load) -> None:
    llm = load(n_ctx=4096, n_batch=2048)  # loading has run a batch of 2048 rows, in another thread
    prompt = PROMPT[:2048]
    answers = [llm.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True) for _ in range(3)]
    assert all(answer.tokens == answers[0].tokens for answer in answers)


@pytest.mark.parametrize("n_left", [96, 256, 1024])
def test_prompts_are_answered_where_little_memory_is_left(load: Load, n_left: int) -> None:
    """MiB: not enough for graphs, or only for some of them."""
    llm = load(n_ctx=4096, n_batch=2048)
    sizes = (2048, 1500, 700, 300, 40, 2048, 1500)
    ask = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    expected = [llm.generate(PROMPT[:n], **ask).tokens for n in sizes]
    llm = load(n_ctx=4096, n_batch=2048)
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - n_left * MIB, dtype=torch.uint8, device="cuda:0")
    assert [llm.generate(PROMPT[:n], **ask).tokens for n in sizes] == expected
    del hog


def test_captured_graphs_share_the_memory_of_their_outputs(load: Load) -> None:
    llm = load(n_parallel=64)

    def decode(n_requests: int) -> None:
        streams = [
            llm.stream([5 + i], max_tokens=6, temperature=0.0, ignore_eos=True) for i in range(n_requests)
        ]
        for stream in streams:
            stream.finish()

    decode(64)
    before = torch.cuda.memory_allocated()
    for n_requests in (48, 32):
        decode(n_requests)
    logits = 4 * llm.tokenizer.n_vocab  # bytes of a row
    assert torch.cuda.memory_allocated() - before < (48 + 32) * logits
