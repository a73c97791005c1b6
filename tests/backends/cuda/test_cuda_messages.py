"""Messages between a GPU's kernels (under Triton's interpreter) and native programs, without a thread in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

from test_cuda_beside_cpu import TOKENS, alone, assert_close, open_crew

from motley import LLM
from motley.backends import is_available
from motley.backends.cpu.backend import CpuExecutable
from motley.backends.cpu.native import NativeRendezvous, core
from motley.backends.cuda.executable import CudaExecutable
from motley.backends.cuda.messages import PinnedMessages
from motley.errors import DeviceError
from random_models import RandomModel

pytestmark = pytest.mark.skipif(not is_available(), reason="the native module is not built")

N = 5000  # more than a program's values


class Pair:
    """A device's messages, and the native side of them."""

    def __init__(self) -> None:
        self.messages = PinnedMessages(torch.device("cpu"), n_values=3 * N)
        self.rendezvous = NativeRendezvous(core.Group(2))
        assert self.rendezvous.attach(self.messages)
        self._pool = core.Pool(1)

    def native(self, x: torch.Tensor, out: torch.Tensor) -> threading.Thread:
        """A run of a program that sends x, and adds it to what it hears."""
        program = core.Program(self._pool)
        program.advance(self.rendezvous.tagged)
        program.post(self.rendezvous.tagged, 7, x.data_ptr(), N)
        program.await_message(self.rendezvous.tagged, 3, out.data_ptr(), N, x.data_ptr())
        thread = threading.Thread(target=program.run)
        thread.start()
        return thread

    def device(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The same on the other side."""
        self.messages.advance()
        self.messages.post(x, 3)
        self.messages.fetch(7, out, x)
        self.messages.finish()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def check_sums(pair: Pair, seed: int) -> None:
    here, there = torch.randn(2, N, generator=torch.Generator().manual_seed(seed))
    sums = torch.empty(2, N)
    thread = pair.native(there, sums[1])
    pair.device(here, sums[0])
    thread.join(300)
    assert sums[0].equal(here + there)
    assert sums[1].equal(here + there)


def test_both_sides_get_the_sum_run_after_run(pair: Pair) -> None:
    for seed in range(3):
        check_sums(pair, seed)


def test_a_message_keeps_all_bits_of_whole_numbers(pair: Pair) -> None:
    bits = torch.tensor([-1, 0, 1, 2**31 - 1, -(2**31), 0x7FC00001], dtype=torch.int32)
    pair.messages.advance()
    pair.messages.post(bits, 0)
    sent, heard, _ = pair.messages.addresses
    assert sent != heard
    words = pair.messages._sent[: len(bits)]
    assert (words >> 32).tolist() == [1] * len(bits)
    pair.messages._heard[: len(bits)] = words
    out = torch.empty_like(bits)
    pair.messages.fetch(0, out)
    assert out.equal(bits)


def test_a_device_that_waits_stops_when_the_other_has_failed_and_later_runs_work(pair: Pair) -> None:
    check_sums(pair, 0)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            pair.device(torch.zeros(N), torch.empty(N))
        except pair.rendezvous.aborted_error as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pair.rendezvous.abort()
    waiting.join(300)
    assert len(failed) == 1
    pair.rendezvous.reset()
    check_sums(pair, 1)


def test_a_native_program_that_waits_stops_when_the_device_has_failed(pair: Pair) -> None:
    program = core.Program(core.Pool(1))
    program.advance(pair.rendezvous.tagged)
    out = torch.empty(N)
    program.await_message(pair.rendezvous.tagged, 0, out.data_ptr(), N, 0)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            program.run()
        except core.AbortedError as error:
            failed.append(error)

    waiting = threading.Thread(target=run)
    waiting.start()
    pair.rendezvous.abort()
    waiting.join(300)
    assert len(failed) == 1
    pair.rendezvous.reset()
    check_sums(pair, 2)


Model = tuple[Path, npt.NDArray[np.float32]]  # and its logits on one device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    made = RandomModel("llama", 2, 4, 2, {"rope.freq_base": 500_000.0})
    path = made.write(tmp_path_factory.mktemp("models") / "llama.gguf")
    return path, alone(path)


@pytest.fixture
def crew(model: Model, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_crew(model[0], monkeypatch, split_mode=request.param, tensor_split=(1, 1)) as llm:
        yield llm


@pytest.mark.parametrize("crew", ["layer", "tensor"], indirect=True)
def test_small_batches_need_no_thread_at_the_rendezvous(
    crew: LLM, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a thread takes part")

    for name in ("exchange", "send", "receive"):
        monkeypatch.setattr(NativeRendezvous, name, refuse)
    assert_close(crew.logits(TOKENS), model[1])


@pytest.mark.parametrize("crew", ["tensor"], indirect=True)
@pytest.mark.parametrize("kind", [CpuExecutable, CudaExecutable])
def test_a_batch_that_fails_on_one_device_fails_with_its_reason_and_the_next_one_runs(
    crew: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    expected = crew.logits(TOKENS)

    def fail(*_: Any) -> None:
        raise ValueError("no more memory")

    with monkeypatch.context() as patched:
        patched.setattr(kind, "run", fail)
        with pytest.raises(DeviceError, match="no more memory"):
            crew.logits(TOKENS)
    np.testing.assert_array_equal(crew.logits(TOKENS), expected)
