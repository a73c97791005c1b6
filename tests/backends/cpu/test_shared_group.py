"""Groups of several processes in shared memory; here the processes are threads, each with a mapping of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from motley.backends import SharedGroup

pytestmark = pytest.mark.skipif(SharedGroup.n_bytes(2) == 0, reason="the native module has no shared groups")
N_MEMBERS = 3


@pytest.fixture
def groups() -> Iterator[list[SharedGroup]]:
    file = os.memfd_create("groups")
    os.ftruncate(file, 4096 + SharedGroup.n_bytes(N_MEMBERS))
    found = [SharedGroup(file, 4096, N_MEMBERS) for _ in range(N_MEMBERS)]
    os.close(file)
    yield found
    for group in found:
        group.abort()


def at_once(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.parametrize("counts", [(5, 7, 0), (300_000, 10, 600_000)])  # a slot has room for 262144 values
def test_each_member_gets_the_values_of_all_others(
    groups: list[SharedGroup], counts: tuple[int, ...]
) -> None:
    found: dict[tuple[int, int], list[torch.Tensor]] = {}

    def exchange(member: int) -> None:
        for k in range(4):  # both slots, twice
            own = torch.arange(counts[member], dtype=torch.int32) + 1000 * member + k
            parts = groups[member].exchange(member, own, counts)
            assert parts is not None
            for other, part in parts.items():
                found.setdefault((member, other), []).append(part.clone())

    at_once(*(lambda m=member: exchange(m) for member in range(N_MEMBERS)))  # type: ignore[misc]
    assert len(found) == 6
    for (_, other), parts in found.items():
        for k, part in enumerate(parts):
            assert torch.equal(part, torch.arange(counts[other], dtype=torch.int32) + 1000 * other + k)


@pytest.mark.parametrize("n", [1, 65_536, 200_000])  # a message is cut into pieces of 65536 values
def test_messages_arrive_in_order(groups: list[SharedGroup], n: int) -> None:
    received = [torch.empty(n) for _ in range(3)]

    def send() -> None:
        for k in range(3):
            assert groups[0].send(0, 2, torch.full((n,), float(k)))

    def receive() -> None:
        for out in received:
            assert groups[2].receive(0, 2, out)

    at_once(send, receive)
    for k, out in enumerate(received):
        assert torch.equal(out, torch.full((n,), float(k)))


def test_a_member_that_waits_is_aborted(groups: list[SharedGroup]) -> None:
    """Also one that sleeps already, and for good; members of other processes are not."""
    results: list[object] = []

    def wait() -> None:
        results.append(groups[0].exchange(0, torch.zeros(1), (1, 1, 1)))
        results.append(groups[0].receive(1, 0, torch.zeros(1)))

    at_once(wait, lambda: (threading.Event().wait(0.05), groups[0].abort()))
    assert results == [None, False]
    assert groups[1].send(1, 2, torch.zeros(1))
