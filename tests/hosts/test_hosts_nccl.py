"""NCCL lines. Gloo stands in for NCCL, by the same calls on tensors of the CPU: there was never more than one GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_hosts_lines import at_once
from test_hosts_models import OPTIONS, answers

from motley import LLM
from motley.errors import DeviceError
from motley.graph import Shape
from motley.runtime.group import PartSizes
from motley.runtime.hosts import nccl
from motley.runtime.hosts.addresses import AddressBook
from motley.runtime.hosts.lines import LineClosedError
from motley.runtime.hosts.nccl import NcclLines, open_nccl
from motley.runtime.hosts.serving import WorkerServer
from motley.runtime.hosts.wire import decode, encode

OWNERS = (0, 1, 0)  # devices 0 and 2 are of one process


def gloo_group(store: Any, rank: int, n_ranks: int, place: torch.device) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=120)
    options._threads = 1
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, n_ranks, options)


@pytest.fixture
def gloo_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_NCCL", "1")
    monkeypatch.setattr(nccl, "make_group", gloo_group)
    monkeypatch.setattr(nccl, "place_of", lambda name: torch.device("cpu"))
    monkeypatch.setattr(nccl, "are_gpus", bool)
    lock, given = threading.Lock(), iter(range(1 << 20))

    def new_ids(names: list[str]) -> list[str]:
        with lock:
            return [f"gpu-{next(given)}" for _ in names]

    monkeypatch.setattr(nccl, "_gpu_ids", new_ids)


def connected(wire: str = "f32") -> list[NcclLines]:
    """The lines of each process."""
    book = AddressBook()
    names = ["cuda:0", "cuda:0", "cuda:1"]
    ranks = range(max(OWNERS) + 1)
    found = at_once(*((lambda r=r: open_nccl(r, OWNERS, names, wire, book.put, book.lookup)) for r in ranks))  # type: ignore[misc]
    assert all(isinstance(each, NcclLines) for each in found), found
    return found


@pytest.fixture
def lines(gloo_stands_in: None) -> Iterator[list[NcclLines]]:
    found = connected()
    yield found
    for each in found:
        each.close()


def on_all(
    lines: list[NcclLines], work: Callable[[NcclLines, int], Any], devices: tuple[int, ...] = (0, 1, 2)
) -> list[Any]:
    return at_once(*((lambda d=d: work(lines[OWNERS[d]], d)) for d in devices))  # type: ignore[misc]


def parts_of(shapes: tuple[Shape | None, ...], dtype: torch.dtype) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    return [
        None if shape is None else (torch.randn(shape, generator=generator) * 100).to(dtype)
        for shape in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize(
    "shapes", [((2, 8), (2, 8), (2, 8)), ((3, 5), (3, 1), (3, 0)), (None, (4, 4), None), ((0, 2),) * 3]
)
def test_all_devices_get_the_parts_of_all(
    shapes: tuple[Shape | None, ...], dtype: torch.dtype, lines: list[NcclLines]
) -> None:
    parts = parts_of(shapes, dtype)
    sizes = PartSizes(shapes, dtype)
    for _ in range(2):
        for found in on_all(lines, lambda own, d: own.exchange(d, parts[d], sizes)):
            assert len(found) == len(parts), found
            for part, expected in zip(found, parts, strict=True):
                assert (part is None) == (expected is None)
                assert expected is None or (torch.equal(part, expected) and part.shape == expected.shape)


@pytest.mark.parametrize("reader", [0, 2])
def test_one_reader_gets_the_parts_of_all(reader: int, lines: list[NcclLines]) -> None:
    shapes: tuple[Shape | None, ...] = ((2, 3), (2, 7), None)
    parts = parts_of(shapes, torch.float32)
    sizes = PartSizes(shapes, torch.float32, reader=reader)
    found = on_all(lines, lambda own, d: own.exchange(d, parts[d], sizes))
    assert [each for device, each in enumerate(found) if device != reader] == [[], []]
    assert torch.equal(found[reader][0], parts[0])
    assert torch.equal(found[reader][1], parts[1])
    assert found[reader][2] is None


def test_messages_between_two_devices(lines: list[NcclLines]) -> None:
    for source, target, dtype in ((0, 1, torch.float32), (1, 2, torch.int32)):
        (tensor,) = parts_of(((3, 4),), dtype)
        assert tensor is not None

        def work(own: NcclLines, device: int, tensor: Any = tensor, route: Any = (source, target)) -> Any:
            if device == route[0]:
                return own.send(tensor, *route)
            return own.receive(*route, tensor.shape, tensor.dtype)

        found = on_all(lines, work, (source, target))
        assert found[0] is None
        assert torch.equal(found[1], tensor)


@pytest.mark.parametrize("wire", ["f16", "q8"])
def test_the_wire_shortens_addends_and_hidden_rows(wire: str, gloo_stands_in: None) -> None:
    lines = connected(wire)
    parts = parts_of(((2, 40),) * 3, torch.float32)
    rounded = [decode(wire, encode(wire, p.flatten()), 80).view(2, 40) for p in parts if p is not None]
    for is_sum, expected in ((True, rounded), (False, parts)):
        sizes = PartSizes(((2, 40),) * 3, torch.float32, is_sum=is_sum)
        for found in on_all(lines, lambda own, d, sizes=sizes: own.exchange(d, parts[d], sizes)):  # type: ignore[misc]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    def work(own: NcclLines, device: int) -> Any:
        return own.receive(0, 1, (2, 40), torch.float32) if device else own.send(parts[0], 0, 1)  # type: ignore[arg-type]

    assert torch.equal(on_all(lines, work, (0, 1))[1], rounded[0])
    for each in lines:
        each.close()


def test_an_aborted_message_is_an_error() -> None:
    """NCCL's abort lets the GPU go on with worthless results."""

    class Group:
        waiting, is_aborted = threading.Event(), threading.Event()

        def recv(self, *given: Any) -> Group:
            return self

        def wait(self, timeout: timedelta) -> None:
            self.waiting.set()
            assert self.is_aborted.wait(60)

        def abort(self) -> None:
            self.is_aborted.set()

    group = Group()
    lines = NcclLines({0: group}, {0: torch.device("cpu")}, "f32")

    def abort() -> None:
        assert group.waiting.wait(60)
        lines.abort()

    found = at_once(lambda: lines.receive(1, 0, (2,), torch.float32), abort)
    assert isinstance(found[0], LineClosedError)
    assert found[1] is None
    lines.close()
    with pytest.raises(LineClosedError):
        lines.send(torch.ones(1), 0, 1)


def opened(names: list[str]) -> list[Any]:
    book = AddressBook()
    return at_once(
        *((lambda r=r: open_nccl(r, (0, 1), names, "f32", book.put, book.lookup)) for r in (0, 1))  # type: ignore[misc]
    )


@pytest.mark.parametrize("asked", ["", "1"])
def test_crews_that_cannot_use_nccl(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lines are used, or, if NCCL was asked for, an error says why there is none."""
    monkeypatch.setenv("MOTLEY_NCCL", asked)
    monkeypatch.setattr(nccl, "_gpu_ids", lambda names: ["the same"])
    shared = opened(["cuda:0", "cuda:0"])
    monkeypatch.setattr(nccl, "_gpu_ids", lambda names: [])
    for found, reason in (
        (shared, "two devices are the same GPU"),
        (opened(["cuda:0", "cuda:0"]), "not available"),
        (opened(["cuda:0", "cpu"]), "not all devices are GPUs"),
    ):
        assert found[1] is None
        if asked:
            assert isinstance(found[0], DeviceError)
            assert reason in str(found[0])
        else:
            assert found[0] is None


@pytest.mark.parametrize("said", ["", "0"])
def test_rank_0_must_ask_for_nccl(said: str, gloo_stands_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_NCCL", said)
    assert opened(["cuda:0", "cuda:0"]) == [None, None]


def test_a_group_of_nccl_is_made_so_that_a_lost_peer_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the names that torch with NCCL has."""
    made: list[Any] = []

    class Options:
        _timeout = timedelta(0)

    class Group:
        Options: Any = None

        def __init__(self, *given: Any) -> None:
            made.extend(given)

        def eager_connect_single_device(self, place: torch.device) -> None:
            made.append(place)

    Group.Options = Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    nccl.make_group("store", 1, 3, torch.device("cuda:1"))
    assert made[:3] == ["store", 1, 3]
    assert made[3]._timeout > timedelta(hours=1)
    assert made[4] == torch.device("cuda:1")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_a_failure_of_nccl_says_how_to_do_without(
    gloo_stands_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("ncclUnhandledCudaError\nmore")

    monkeypatch.setattr(nccl, "make_group", fail)
    for error in opened(["cuda:0", "cuda:0"]):
        assert isinstance(error, DeviceError)
        assert "ncclUnhandledCudaError" in error.message
        assert "without MOTLEY_NCCL=1" in (error.hint or "")


@pytest.mark.parametrize(
    ("names", "mode"), [("cpu,cpu@a", "tensor"), ("cpu,cpu@a,cpu", "layer"), ("(cpu,cpu)@a,cpu", None)]
)
def test_a_crew_answers_over_these_lines_bit_for_bit(
    names: str,
    mode: str | None,
    random_llama: Path,
    gloo_stands_in: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOTLEY_SHARED_MEMORY", "0")  # native programs would do collectives there
    finish, used = NcclLines._finish, []

    def counted(self: NcclLines, device: int, begin: Any) -> None:
        used.append(device)
        finish(self, device, begin)

    monkeypatch.setattr(NcclLines, "_finish", counted)
    options = OPTIONS | {"split_mode": mode}
    with LLM(random_llama, devices=names.replace("@a", ""), **options) as llm:
        expected = answers(llm)
    server = WorkerServer(cache=tmp_path, n_threads=1)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        devices = names.replace("@a", f"@{server.address}")
        with LLM(random_llama, devices=devices, n_threads=1, **options) as llm:
            found = answers(llm)
    finally:
        server.close()
        thread.join(120)
    assert np.array_equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert set(used) == set(range(names.count("cpu"))) - ({1} if names == "(cpu,cpu)@a,cpu" else set())
