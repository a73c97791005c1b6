"""Devices that take part by their threads where native programs do collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from motley.backends import CpuBackend, HostRendezvous, is_available, make_rendezvous
from motley.errors import DeviceError
from motley.graph import F32, I32, Tensor
from motley.graph.ops import Input
from motley.ownership import Word
from motley.plan import Single
from motley.runtime.group import CollectiveKernel, ThreadGroup
from motley.runtime.rendezvous_line import RendezvousLine
from motley.split.collectives import AllGather, AllReduce, Broadcast, Collective, Receive, ReduceScatter, Send

pytestmark = pytest.mark.skipif(not is_available(), reason="the native module is not built")

N = 3
WORD = Word.concat([Word.of(2, 1), Word.of(0, 2), Word.of(2, 1)])  # device 1 owns nothing
PAIR = (0, 2)


class Crew:
    def __init__(self) -> None:
        rendezvous = make_rendezvous([CpuBackend() for _ in range(N)], [PAIR])
        assert isinstance(rendezvous, HostRendezvous)
        self.group = ThreadGroup([1] * N, rendezvous=rendezvous, groups=[PAIR])
        self.lines = [RendezvousLine(rendezvous, device, N, torch.device("cpu")) for device in range(N)]

    def launch(
        self, device: int, op: Collective, *inputs: torch.Tensor, is_output: bool = False
    ) -> torch.Tensor:
        nodes = [Input(tuple(t.shape), I32 if t.dtype == torch.int32 else F32)(name="x") for t in inputs]
        node: Tensor = op(*nodes)
        out = torch.full(node.shape, -7, dtype=torch.int32 if node.dtype == I32 else torch.float32)
        kernel = CollectiveKernel(self.lines[device], [node] if is_output else [])
        result: torch.Tensor = kernel.prepare(Single.of(node))(inputs, out)
        return result


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.group.close()


def parts_of(shape: Sequence[int]) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 10**i for i in range(N)]


def test_a_sum_has_the_same_bits_on_all_devices(crew: Crew) -> None:
    parts = parts_of((5, 7))
    for _ in range(3):  # memory is used again
        results = crew.group.run(lambda device: crew.launch(device, AllReduce(), parts[device]))
        assert all(result.equal(parts[0] + parts[1] + parts[2]) for result in results)


def test_some_devices_exchange_among_themselves(crew: Crew) -> None:
    parts = parts_of((4,))
    op = AllReduce(members=PAIR)
    results = crew.group.run(lambda d: crew.launch(d, op, parts[d]) if d in PAIR else parts[0] + parts[2])
    assert all(result.equal(parts[0] + parts[2]) for result in results)


def test_parts_are_put_where_the_word_says(crew: Crew) -> None:
    whole = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    parts = [whole[:, [1, 2]], whole[:, :0], whole[:, [0, 3]]]
    results = crew.group.run(lambda d: crew.launch(d, AllGather(1, WORD), parts[d]))
    assert all(result.equal(whole) for result in results)
    total = whole.float() * N
    results = crew.group.run(lambda d: crew.launch(d, ReduceScatter(1, WORD, d), whole.float()))
    assert [r.tolist() for r in results] == [total[:, [1, 2]].tolist(), [[], []], total[:, [0, 3]].tolist()]


def test_messages_arrive_in_order(crew: Crew) -> None:
    def work(device: int) -> list[float]:
        heard = []
        for number in range(50):
            if device == 1:
                crew.launch(1, Send(1, 2), torch.full((3,), float(number)))
            elif device == 2:
                heard.append(crew.launch(2, Receive(1, 2, (3,))).tolist()[2])
        return heard

    assert crew.group.run(work) == [[], [], [float(number) for number in range(50)]]


def test_only_the_reader_gets_an_output(crew: Crew) -> None:
    x = torch.arange(6.0)
    op = Broadcast(2, (6,))
    results = crew.group.run(
        lambda d: crew.launch(d, op, *([x] if d == 2 else []), is_output=True),
    )
    assert results[0].equal(x)
    assert results[1].tolist() == [-7] * 6


def test_a_device_that_fails_does_not_keep_the_others_waiting(crew: Crew) -> None:
    def work(device: int) -> torch.Tensor:
        if device == 1:
            raise ValueError("no more memory")
        return crew.launch(device, AllReduce(), torch.ones(2))

    with pytest.raises(DeviceError, match="no more memory"):
        crew.group.run(work)
    results = crew.group.run(lambda device: crew.launch(device, AllReduce(), torch.ones(2)))
    assert [result.tolist() for result in results] == [[3.0, 3.0]] * N
