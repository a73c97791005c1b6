"""Devices on threads: what they exchange, and what happens to the others when one fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from motley.errors import DeviceError, SplitError
from motley.graph import F32, I32, Tensor
from motley.graph.ops import Input
from motley.ownership import Word
from motley.plan import Single
from motley.runtime.group import CollectiveKernel, ThreadGroup
from motley.split.collectives import AllGather, AllReduce, Broadcast, Collective, Receive, ReduceScatter, Send

N = 3
WORD = Word.concat([Word.of(2, 1), Word.of(0, 2), Word.of(2, 1)])  # device 1 owns nothing


@pytest.fixture
def group() -> Iterator[ThreadGroup]:
    group = ThreadGroup([1] * N)
    yield group
    group.close()


def launch(group: ThreadGroup, device: int, op: Collective, *inputs: torch.Tensor) -> torch.Tensor:
    """Run a collective as an executable does: with memory for its output."""
    nodes = [Input(tuple(t.shape), I32 if t.dtype == torch.int32 else F32)(name="x") for t in inputs]
    node: Tensor = op(*nodes)
    kernel = CollectiveKernel(group.lines[device])
    assert kernel.supports(Single.of(node)) is None
    out = torch.full(node.shape, -7.0, dtype=torch.int32 if node.dtype == I32 else torch.float32)
    result: torch.Tensor = kernel.prepare(Single.of(node))(inputs, out)
    return result


def test_work_runs_on_every_device_and_results_are_in_order(group: ThreadGroup) -> None:
    assert group.run(lambda device: device * 10) == [0, 10, 20]


def test_exchanges_do_not_overwrite_each_other(group: ThreadGroup) -> None:
    """A device may be ahead of another by less than one exchange, which must not be seen."""

    def work(device: int) -> list[list[float]]:
        line, heard = group.lines[device], []
        part = torch.zeros(1)
        for i in range(200):
            part.fill_(100 * i + device)  # at once, in the memory that was just sent
            heard.append([float(t) for t in line.exchange(part) if t is not None])
        return heard

    expected = [[100.0 * i + device for device in range(N)] for i in range(200)]
    assert group.run(work) == [expected] * N


def test_all_reduce_adds_up_to_the_same_bits_everywhere(group: ThreadGroup) -> None:
    parts = [torch.randn(5, 7, generator=torch.Generator().manual_seed(i)) * 10**i for i in range(N)]
    results = group.run(lambda device: launch(group, device, AllReduce(), parts[device]))
    assert all(result.equal(parts[0] + parts[1] + parts[2]) for result in results)


def test_reduce_scatter_leaves_each_device_its_indices_of_the_sum(group: ThreadGroup) -> None:
    parts = [torch.arange(8.0).reshape(2, 4) * 10**i for i in range(N)]
    results = group.run(lambda d: launch(group, d, ReduceScatter(1, WORD, d), parts[d]))
    total = parts[0] + parts[1] + parts[2]
    assert [r.tolist() for r in results] == [total[:, [1, 2]].tolist(), [[], []], total[:, [0, 3]].tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_all_gather_puts_parts_where_the_word_says(group: ThreadGroup, dtype: torch.dtype) -> None:
    whole = torch.arange(8).reshape(2, 4).to(dtype)
    parts = [whole[:, [1, 2]], whole[:, :0], whole[:, [0, 3]]]
    results = group.run(lambda d: launch(group, d, AllGather(1, WORD), parts[d]))
    assert all(result.equal(whole) and result.dtype == dtype for result in results)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, F32), (torch.int32, I32)])
def test_broadcast_gives_the_roots_tensor_to_all(group: ThreadGroup, dtype: torch.dtype, kind: str) -> None:
    value = torch.arange(4).to(dtype)
    op = Broadcast(1, (4,), kind)
    results = group.run(lambda d: launch(group, d, op, *([value] if d == 1 else [])))
    assert all(result.equal(value) for result in results)


def test_mail_goes_from_one_device_to_one_other_in_order(group: ThreadGroup) -> None:
    def work(device: int) -> list[float]:
        if device == 2:
            for i in range(5):
                launch(group, 2, Send(2, 0), torch.tensor([float(i)]))
        if device == 0:
            return [float(launch(group, 0, Receive(2, 0, (1,)))) for _ in range(5)]
        return []

    assert group.run(work) == [[0, 1, 2, 3, 4], [], []]


def test_what_is_sent_is_a_copy(group: ThreadGroup) -> None:
    def work(device: int) -> float:
        value = torch.tensor([float(device)])
        if device == 0:
            group.lines[0].send(value, 1)
            value.fill_(-1)
        group.lines[device].exchange(None)
        return float(group.lines[1].receive(0)) if device == 1 else 0.0

    assert group.run(work)[1] == 0.0


@pytest.mark.parametrize("waiting", ["exchange", "receive"])
def test_a_failure_ends_the_others_and_the_group_works_afterwards(group: ThreadGroup, waiting: str) -> None:
    def work(device: int) -> None:
        line = group.lines[device]
        if device == 1:
            line.send(torch.tensor([99.0]), 0)  # mail that nobody will fetch
            line.exchange(None)
            raise ZeroDivisionError("the second device is broken")
        line.exchange(None)
        if waiting == "exchange":
            line.exchange(torch.ones(1))
        else:
            line.receive(2 - device)

    with pytest.raises(DeviceError, match="a device failed: the second device is broken") as failure:
        group.run(work)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)

    def again(device: int) -> list[float]:
        line = group.lines[device]
        heard = [float(t) for t in line.exchange(torch.tensor([float(device)])) if t is not None]
        line.send(torch.tensor([float(device)]), (device + 1) % N)
        return [*heard, float(line.receive((device - 1) % N))]

    assert group.run(again) == [[0, 1, 2, 2], [0, 1, 2, 0], [0, 1, 2, 1]]


class FakeRendezvous:
    """Where executables would wait for each other."""

    class AbortedError(Exception):
        pass

    aborted_error = AbortedError

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.n_resets = 0

    def abort(self) -> None:
        self.aborted.set()

    def reset(self) -> None:
        self.aborted.clear()
        self.n_resets += 1


def test_devices_at_the_backends_rendezvous_are_aborted_and_not_named_as_the_cause() -> None:
    place = FakeRendezvous()
    group = ThreadGroup([1] * N, rendezvous=place)

    def work(device: int) -> None:
        if device == N - 1:
            raise ZeroDivisionError("the last device is broken")
        place.aborted.wait()
        raise place.aborted_error

    with pytest.raises(DeviceError, match="the last device is broken"):
        group.run(work)
    assert place.n_resets == 1
    assert group.run(lambda device: device) == [0, 1, 2]
    assert CollectiveKernel(group.lines[1]).rendezvous == (place, 1)
    group.close()


def test_devices_of_a_group_exchange_among_themselves_and_end_with_any_other() -> None:
    group = ThreadGroup([1] * N, groups=[(0, 2)])

    def exchange(device: int) -> list[float | None]:
        if device == 1:
            return []
        parts = group.lines[device].exchange_among((0, 2), torch.tensor(float(device)))
        return [None if part is None else float(part) for part in parts]

    assert group.run(exchange) == [[0, None, 2], [], [0, None, 2]]

    def fail(device: int) -> None:
        if device == 1:
            raise ZeroDivisionError("the device outside is broken")
        if device == 2:
            group.lines[device].exchange_among((0, 2), None)  # device 0 never comes

    with pytest.raises(DeviceError, match="the device outside is broken"):
        group.run(fail)
    assert group.run(exchange) == [[0, None, 2], [], [0, None, 2]]
    group.close()


def test_what_a_user_caused_is_raised_as_it_is(group: ThreadGroup) -> None:
    def work(device: int) -> None:
        if device == 2:
            raise SplitError("op", [], "why")
        group.lines[device].exchange(None)

    with pytest.raises(SplitError, match="op: why"):
        group.run(work)


def test_the_first_cause_is_named_not_its_consequences(group: ThreadGroup) -> None:
    def work(device: int) -> None:
        group.lines[device].exchange(None)
        if device == 0:
            raise ValueError("cause")
        group.lines[device].exchange(None)

    for _ in range(10):
        with pytest.raises(DeviceError, match="cause"):
            group.run(work)


def test_torch_uses_a_devices_threads_there_and_its_own_elsewhere() -> None:
    before = torch.get_num_threads()
    for n_threads in (before + 1, 1):
        group = ThreadGroup([n_threads] * 3)
        assert group.run(lambda device: torch.get_num_threads()) == [n_threads] * 3
        group.close()
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are not bound on this system")
def test_a_device_keeps_to_its_cores_and_leaves_the_caller_alone() -> None:
    allowed = os.sched_getaffinity(0)
    first, last = min(allowed), max(allowed)
    group = ThreadGroup([1, 1, 1], [(first,), (), (last,)])
    assert group.run(lambda device: os.sched_getaffinity(0)) == [{first}, allowed, {last}]
    group.close()
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("device", range(N))
def test_an_interrupt_while_work_is_handed_out_leaves_no_device_waiting(
    group: ThreadGroup, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C falls between two devices: the first already waits for the others at a barrier."""

    class Interrupted:
        def put(self, job: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(group._workers[device], "jobs", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            group.run(lambda d: group.lines[d].exchange(torch.ones(1)))
    assert group.run(lambda d: len(group.lines[d].exchange(torch.ones(1)))) == [N] * N


def test_an_interrupt_while_devices_work_is_raised_when_they_have_ended(
    group: ThreadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []

    def work(device: int) -> None:
        group.lines[device].exchange(None)
        if device == 0:
            while len(ended) < N - 1:  # the others are past the barrier
                pass
            signal.pthread_kill(
                threading.main_thread().ident, signal.SIGINT
            )  # also wakes a thread that waits
            while not group._exchanges[()].barrier.broken:  # until the others are told to stop
                pass
        ended.append(device)

    with pytest.raises(KeyboardInterrupt):
        group.run(work)
    assert sorted(ended) == [0, 1, 2]
    assert group.run(lambda d: d) == [0, 1, 2]
