"""The control connection: who may speak, what is believed, and what garbage does to a worker."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motley import LLM
from motley.cli.options.loading import LoadOptions
from motley.errors import ConfigError, DeviceError
from motley.kvcache.arena import GroupBatch, SequenceTable
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.kvcache.state_arena import StateBatch, StateSpan
from motley.kvcache.states import NO_SLOT
from motley.kvcache.types import get_cache_type
from motley.models import N_EXPERT_USED, BatchShape
from motley.runtime.batch import PlacedBatch
from motley.runtime.hosts import opening, protocol
from motley.runtime.hosts.cache_bytes import PlaneSizes
from motley.runtime.hosts.calling import connect, describe_host
from motley.runtime.hosts.messages import (
    Limits,
    StepReader,
    StepWriter,
    emptied_message,
    layer_slots_message,
    shifts_message,
)
from motley.runtime.hosts.protocol import Channel, Kind, ProtocolError, answer, call, read_secret
from motley.runtime.hosts.serving import WorkerServer
from motley.runtime.hosts.wire import WIRES, choose_wire, decode, encode, wire_bytes
from thorough import examples

SECRET = b"a secret of some length"
LIMITS = Limits(
    n_vocab=100,
    n_layers=4,
    n_experts=8,
    max_tokens=16,
    block_size=4,
    n_blocks=(10, 6),
    n_state_slots=5,
    n_state_rings=3,
    n_pending=4,
)


# --- handshake and messages ---------------------------------------------------------------------------------


def shaken(caller: bytes, worker: bytes) -> tuple[Channel, Channel]:
    """Both ends of a connection after the handshake."""
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.settimeout(60)
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(answer(theirs, worker))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        own = call(ours, caller)
    finally:
        thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return own, found[0]


@pytest.fixture(autouse=True)
def plain_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_KEEP_ALIVE", ())  # a socketpair has no TCP options


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_messages_arrive_both_ways(secret: bytes) -> None:
    a, b = shaken(secret, secret)
    a.send(Kind.RUN, b"12345")
    a.send_json(Kind.OPEN, x=1)
    assert b.receive() == (Kind.RUN, b"12345")
    assert json.loads(b.receive()[1]) == {"x": 1}
    b.send(Kind.RESULT)
    assert a.receive() == (Kind.RESULT, b"")


def test_another_secret_is_told_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="another secret"):
        shaken(SECRET, SECRET + b"!")
    ours, theirs = socket.socketpair()

    def work() -> None:
        with suppress(ProtocolError):
            call(ours, SECRET)

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(ProtocolError, match="the caller has another secret"):
        answer(theirs, b"")
    thread.join()


class SlowSocket:
    """A connection whose reader leaves `recv_into` only when the test lets it."""

    def __init__(self) -> None:
        self.is_shut, self.may_leave, self.is_closed = threading.Event(), threading.Event(), threading.Event()
        self.is_read = threading.Event()

    def recv_into(self, buffer: memoryview) -> int:
        self.is_read.set()
        assert self.may_leave.wait(60)
        assert not self.is_closed.is_set(), "its descriptor may be another connection's by now"
        return 0

    def shutdown(self, how: int) -> None:
        self.is_shut.set()

    def close(self) -> None:
        self.is_closed.set()


def test_a_connection_is_not_closed_under_a_thread_that_reads_it() -> None:
    """The system would give its number to the next connection, and the thread would read that one."""
    slow: Any = SlowSocket()
    channel = protocol.Channel(slow, b"", b"")
    ended: list[BaseException] = []

    def read() -> None:
        try:
            channel.receive()
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=work) for work in (read, channel.close)]
    threads[0].start()
    assert slow.is_read.wait(60)
    threads[1].start()
    assert slow.is_shut.wait(60)
    slow.may_leave.set()
    for thread in threads:
        thread.join(60)
    assert slow.is_closed.is_set()
    assert [type(error) for error in ended] == [EOFError]


def test_another_protocol_is_told_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(struct.pack("<8sH32s", b"MOTLEYHS", 7, bytes(32)))
    with pytest.raises(ProtocolError, match="speaks protocol 7, this is 3"):
        answer(theirs, SECRET)
    magic, number, _ = struct.unpack("<8sH32s", ours.recv(42))
    assert (magic, number) == (b"MOTLEYHS", protocol.PROTOCOL)  # so the other side can say the same


def test_each_bit_of_a_message_counts() -> None:
    """What one side sends is changed on its way."""
    for position in range(8 + 5 + 16):
        a, b = shaken(SECRET, SECRET)
        wire = socket.socketpair()
        raw = b._connection
        a.send(Kind.RUN, b"12345")
        data = bytearray(raw.recv(1000))
        data[position] ^= 1
        wire[0].sendall(data)
        wire[0].close()
        b._connection = wire[1]
        with pytest.raises((ProtocolError, EOFError)):
            b.receive()


def test_messages_cannot_be_repeated() -> None:
    a, b = shaken(SECRET, SECRET)
    a.send(Kind.RUN, b"12345")
    data = b._connection.recv(1000)
    left, right = socket.socketpair()
    left.sendall(data + data)
    b._connection = right
    assert b.receive() == (Kind.RUN, b"12345")
    with pytest.raises(ProtocolError, match="false MAC"):
        b.receive()


def test_secret_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="5 bytes"):
        read_secret(path)
    path.write_bytes(SECRET + b"\n")
    assert read_secret(path) == SECRET
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="read by others"):
        read_secret(path)


# --- steps --------------------------------------------------------------------------------------------------


def tables(*rows: tuple[int, int, int, list[int]]) -> tuple[SequenceTable, ...]:
    """Tables from (rows, position, first, blocks)."""
    found, first_row = [], 0
    for n_rows, position, first, blocks in rows:
        found.append(SequenceTable(first_row, n_rows, position, first, np.array(blocks, np.int32)))
        first_row += n_rows
    return tuple(found)


def batch_of(n_rows: int, blocks: list[int]) -> tuple[PlacedBatch, dict[str, torch.Tensor]]:
    groups = (
        GroupBatch.of(tables((n_rows, 5, 0, blocks), (1, 2, 0, [7])), 4),
        GroupBatch.of(tables((n_rows, 5, 4, blocks[1:]), (1, 2, 0, [5])), 4),
        StateBatch(
            (StateSpan(0, n_rows, 5, 4, 3, 1, 4, 6, 2), StateSpan(n_rows, 1, 2, NO_SLOT, 0, 0, 3, 3, NO_SLOT))
        ),
    )
    n_tokens = n_rows + 1
    inputs = {
        "positions": torch.arange(n_tokens, dtype=torch.int32),
        "output_rows": torch.tensor([n_rows], dtype=torch.int32),
        N_EXPERT_USED: torch.full((n_tokens,), 3, dtype=torch.int32),
    }
    placed = PlacedBatch(BatchShape(n_tokens, 1, 2, 4, True), inputs, groups)
    return placed, {"tokens": torch.arange(n_tokens, dtype=torch.int32), **inputs}


COPIES = [BlockCopy(1, 2, 3, 4), BlockCopy(0, 9, 8, 1)]
SHAPE = BatchShape(8, 1, 2, 4, True)


def test_steps_arrive_as_they_were_sent() -> None:
    writer, reader = StepWriter(), StepReader(LIMITS)
    sizes = []
    for n_rows, blocks in ((3, [1, 2]), (4, [1, 2, 3]), (4, [1, 2, 4]), (3, [5, 3])):
        batch, inputs = batch_of(n_rows, blocks)
        payload = writer.run(SHAPE, batch, inputs, COPIES)
        sizes.append(len(payload))
        found = reader.run(payload)
        assert (found.shape, found.batch.shape, found.copies) == (SHAPE, batch.shape, COPIES)
        assert {k: v.tolist() for k, v in found.inputs.items()} == {k: v.tolist() for k, v in inputs.items()}
        assert found.batch.cache[2] == batch.cache[2]
        for own, theirs in zip(found.batch.cache[:2], batch.cache[:2], strict=True):
            assert isinstance(own, GroupBatch)
            assert isinstance(theirs, GroupBatch)
            assert own.slots.tolist() == theirs.slots.tolist()
            for a, b in zip(own.tables, theirs.tables, strict=True):
                assert (a.first_row, a.n_rows, a.position, a.first) == (
                    b.first_row,
                    b.n_rows,
                    b.position,
                    b.first,
                )
                assert a.blocks.tolist() == b.blocks.tolist()


def test_trees_arrive_as_they_were_sent_and_others_are_refused() -> None:
    limits = replace(LIMITS, n_state_slots=0, max_tokens=80)
    seen = np.array([1, 3, 5, 11], np.uint64)
    high = np.array([(1 << 64) - 1 >> 63 - i for i in range(64)], np.uint64)
    for n_rows, masks in ((4, seen), (64, high)):
        placed, inputs = batch_of(n_rows, [1] * (3 + n_rows // 4))
        groups = []
        for group in placed.cache[:2]:
            assert isinstance(group, GroupBatch)
            first, other = group.tables
            n_blocks = -(-(first.position + n_rows - first.first) // 4)
            blocks = np.arange(n_blocks, dtype=np.int32) % 6
            groups.append(GroupBatch.of((replace(first, seen=masks, blocks=blocks), other), 4))
        batch = replace(placed, cache=tuple(groups))
        found = StepReader(limits).run(StepWriter().run(replace(SHAPE, n_tokens=80), batch, inputs, []))
        for own in found.batch.cache:
            assert isinstance(own, GroupBatch)
            assert own.tables[0].seen is not None
            assert own.tables[0].seen.tolist() == masks.tolist()
            assert own.tables[1].seen is None
        for wrong in (masks << np.uint64(1), masks & np.uint64(1), masks | np.uint64(8)):
            bad = [
                GroupBatch(own.slots, (replace(own.tables[0], seen=wrong), own.tables[1])) for own in groups
            ]
            payload = StepWriter().run(
                replace(SHAPE, n_tokens=80), replace(batch, cache=tuple(bad)), inputs, []
            )
            if wrong.tolist() != masks.tolist():
                with pytest.raises(ProtocolError, match="row of a tree"):
                    StepReader(limits).run(payload)


def test_lists_make_the_same_messages_and_arrive_as_lists() -> None:
    """As rank 0 has them on CPU devices: inputs are lists, tables are the manager's arrays."""
    batch, inputs = batch_of(3, [1, 2])
    groups = [
        GroupBatch(None, [replace(t, blocks=cast(Any, array("i", t.blocks.tolist()))) for t in own.tables], 4)
        for own in batch.cache
        if isinstance(own, GroupBatch)
    ]
    listed = {name: values.tolist() for name, values in inputs.items()}
    given = replace(batch, inputs=listed, cache=(*groups, batch.cache[2]))
    writers = StepWriter(), StepWriter()
    for _ in range(2):  # the second one refers to the tables of the first
        payload = writers[0].run(SHAPE, batch, inputs, COPIES)
        assert writers[1].run(SHAPE, given, listed, COPIES) == payload
    found = StepReader(LIMITS, as_lists=True).run(StepWriter().run(SHAPE, given, listed, COPIES))
    assert found.inputs == listed
    assert [own.slots.tolist() for own in found.batch.cache[:2] if isinstance(own, GroupBatch)] == [
        own.slots.tolist() for own in batch.cache[:2] if isinstance(own, GroupBatch)
    ]


def test_a_decode_step_of_eight_long_requests_is_small() -> None:
    writer = StepWriter()
    sizes = []
    for step in range(2):
        rows = [(1, 30_000 + step, 0, list(range(i, i + 938))) for i in range(8)]
        groups = (GroupBatch.of(tables(*rows), 32),)
        inputs = {
            "positions": torch.zeros(8, dtype=torch.int32),
            "output_rows": torch.arange(8, dtype=torch.int32),
        }
        batch = PlacedBatch(BatchShape(8, 8), inputs, groups)
        sizes.append(len(writer.run(BatchShape(8, 8), batch, {"tokens": inputs["positions"], **inputs}, [])))
    assert sizes[0] > 30_000
    assert sizes[1] < 400


def test_other_messages_arrive_as_they_were_sent() -> None:
    reader = StepReader(LIMITS)
    shifts = [BlockShift(1, [COPIES[0]], [4, 5], [1, 2], 3), BlockShift(0, [], [], [], 3)]
    assert reader.shifts(shifts_message(shifts)) == shifts
    assert reader.emptied(emptied_message([[1, 9], [], [4]])) == [[1, 9], [], [4]]
    layer, slots, rest = reader.layer_slots(layer_slots_message(1, torch.tensor([3, 7])) + b"abc", [40, 24])
    assert (layer, slots.tolist(), rest) == (1, [3, 7], b"abc")
    sizes = PlaneSizes((get_cache_type("q8_0"), get_cache_type("f16")), 40)
    data = os.urandom(sizes.n_bytes(3, 2))
    assert sizes.to_bytes(sizes.from_bytes(data, 3, 2)) == data
    assert sizes.to_bytes(sizes.from_bytes(b"", 3, 0)) == b""


@settings(max_examples=examples(300))
@given(data=st.data())
def test_no_changed_number_leads_outside_of_the_cache(data: st.DataObject) -> None:
    """A message is refused, or all blocks, slots and rows in it exist."""
    batch, inputs = batch_of(4, [1, 2, 3])
    numbers = np.frombuffer(StepWriter().run(SHAPE, batch, inputs, COPIES), np.int32).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(numbers) - 1))
        numbers[place] = data.draw(st.sampled_from([-1, 0, 1, 2, 5, 9, 10, 17, 2**31 - 1, -(2**31)]))
    end = data.draw(st.sampled_from([len(numbers), len(numbers) - 1, len(numbers) // 2]))
    try:
        found = StepReader(LIMITS).run(numbers[:end].tobytes())
    except ProtocolError:
        return
    states = found.batch.cache[2]
    assert isinstance(states, StateBatch)
    for span in states.spans:
        assert -1 <= span.source < 5 > span.target >= 0
        assert -1 <= span.source_ring < 3 > span.target_ring >= -1
        assert 0 <= span.position - span.n_read <= 4 * (span.source_ring >= 0)
        assert 0 <= span.position + span.n_rows - span.n_written <= 4 * (span.target_ring >= 0)
        assert span.position <= span.n_written
    for group, n_blocks in zip(found.batch.cache[:2], LIMITS.n_blocks, strict=True):
        assert isinstance(group, GroupBatch)
        assert len(group.slots) == found.batch.shape.n_tokens
        assert 0 <= int(group.slots.min()) <= int(group.slots.max()) < n_blocks * LIMITS.block_size
        for table in group.tables:
            assert table.n_context <= len(table.blocks) * LIMITS.block_size
    assert all(0 <= c.src < LIMITS.n_blocks[c.group] > c.dst >= 0 <= c.n_tokens <= 4 for c in found.copies)
    assert 0 <= int(found.inputs["tokens"].min()) <= int(found.inputs["tokens"].max()) < LIMITS.n_vocab


@pytest.mark.parametrize("read", ["run", "batches", "shifts", "emptied"])
def test_random_numbers_are_refused_or_read(read: str) -> None:
    rng = random.Random(4)
    for _ in range(3000):
        payload = rng.randbytes(rng.randint(0, 12)) + bytes(rng.choice((0, 4, 40)))
        with suppress(ProtocolError):
            getattr(StepReader(LIMITS), read)(payload)


# --- the wire -----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=100), st.sampled_from(WIRES))
def test_parts_on_the_wire_have_their_size_and_their_precision(values: list[float], kind: str) -> None:
    part = torch.tensor(values, dtype=torch.float32)
    data = encode(kind, part)
    assert data.dtype == torch.uint8
    assert len(data) == wire_bytes(kind, len(part))
    found = decode(kind, data, len(part))
    largest = float(part.abs().max()) if len(part) else 0.0
    limit = {"f32": 0.0, "f16": 2.0**-10, "q8": 1 / 200}[kind] * largest + (kind != "f32") * 1e-5
    assert found.shape == part.shape
    assert float((found - part).abs().max() if len(part) else 0) <= limit


def test_wires_are_chosen_by_distance() -> None:
    assert choose_wire("auto", is_one_machine=True) == "f32"
    assert choose_wire("auto", is_one_machine=False) == "f16"
    assert choose_wire("q8", is_one_machine=True) == "q8"
    with pytest.raises(ConfigError, match="unknown wire type 'f8'"):
        choose_wire("f8", is_one_machine=True)


# --- a worker's port ----------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WorkerServer]:
    server = WorkerServer(secret=SECRET, cache=tmp_path, n_threads=1)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join(60)
    assert not thread.is_alive()


def refusal(server: WorkerServer, **changes: Any) -> str:
    """What a worker says to an opening."""
    said = answer_of(server, changes)
    deadline = time.monotonic() + 120
    while (
        "it serves another crew" in said and time.monotonic() < deadline
    ):  # it has not yet left the one before
        said = answer_of(server, changes)
    return said


def answer_of(server: WorkerServer, changes: Mapping[str, Any]) -> str:
    channel = connect(server.address, SECRET)
    try:
        channel.send_json(Kind.OPEN, **(asked("/no/model.gguf").as_json() | changes))
        kind, payload = channel.receive()
        if kind == Kind.FETCH:  # the worker has no such file
            assert payload == b""
            channel.send(Kind.PIECE, b'{"files": []}')
            kind, payload = channel.receive()
        assert kind == Kind.REFUSED
        return str(json.loads(payload)["message"])
    finally:
        channel.close()


def asked(model: str) -> opening.Opening:
    return opening.Opening(
        software=opening.software(),
        model=model,
        fingerprint="f",
        layout="l",
        rank=1,
        owners=(0, 1),
        devices=("cpu", "cpu"),
        groups=(),
        shares=("1", "1"),
        mode="tensor",
        experts="auto",
        apart_layers=0,
        apart_shares=(),
        backends=("reference", "reference"),
        n_ctx=64,
        k_rotation=0,
        v_rotation=0,
        k_type="f16",
        v_type="f16",
        block_size=16,
        demand_paged=False,
        n_blocks=(4,),
        max_tokens=16,
        wire="f32",
        state_type="f32",
        n_state_slots=0,
        n_state_rings=0,
    )


def test_openings_are_refused_with_a_reason(server: WorkerServer, random_llama: Path) -> None:
    assert "model files that cannot be right" in refusal(server)
    assert "is another model" in refusal(server, model=str(random_llama))
    assert "rank 0 has motley 0.0.0" in refusal(server, software="motley 0.0.0")
    assert "devices is not" in refusal(server, devices="cpu")
    assert "other fields" in refusal(server, more=1)
    assert "no fingerprint" in refusal(server, fingerprint="../f")
    for change in (
        {"rank": 0},
        {"rank": 2},
        {"owners": [0, 2]},
        {"n_blocks": []},
        {"n_ctx": 0},
        {"mode": "x"},
        {"groups": [0]},
        {"groups": [0, 0]},  # a group of two processes
        {"groups": [1, 0]},
        {"groups": [0, 2]},
        {"groups": [-1, 0]},
    ):
        assert "contradict" in refusal(server, **change)
    assert "no fractions" in refusal(server, model=str(random_llama), shares=["1", "x"])


def test_a_worker_shows_its_devices(server: WorkerServer) -> None:
    found = describe_host(server.address, SECRET)
    assert found[0].device == f"cpu@{server.address}"
    assert found[0].cores >= 1


@pytest.mark.parametrize("name", ["a..b", ".", "a" * 300])
def test_names_that_no_host_can_have_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="no worker answers at"):
        connect(f"{name}:29400", SECRET)
    with pytest.raises(ConfigError, match="cannot listen at"):
        WorkerServer(f"{name}:29400", SECRET)


def test_wrong_secrets_are_refused_by_name(server: WorkerServer, random_llama: Path) -> None:
    with pytest.raises(DeviceError, match=f"{server.address}: the worker has another secret"):
        connect(server.address, b"another secret, wrong")
    with pytest.raises(DeviceError, match="another secret"):
        LLM(random_llama, devices=f"cpu,cpu@{server.address}", n_ctx=64)


def test_another_model_of_the_same_name_is_refused(
    random_llama: Path, random_narrow: Path, tmp_path: Path
) -> None:
    (tmp_path / random_llama.name).write_bytes(random_narrow.read_bytes())
    server = WorkerServer(models=tmp_path)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with pytest.raises(DeviceError, match=f"{server.address} refuses: .* is another model"):
            LLM(random_llama, devices=f"cpu,cpu@{server.address}", n_ctx=64, n_threads=1)
    finally:
        server.close()
        thread.join()


@pytest.mark.slow
def test_garbage_leaves_a_worker_alive(server: WorkerServer) -> None:
    host, _, port = server.address.rpartition(":")
    rng = random.Random(1)
    attacks: list[Callable[[socket.socket], None]] = [
        lambda s: s.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4),
        lambda s: s.sendall(rng.randbytes(rng.randint(0, 300))),
        lambda s: s.sendall(
            struct.pack("<8sH32s", b"MOTLEYHS", protocol.PROTOCOL, bytes(32)) + rng.randbytes(100)
        ),
        lambda s: s.sendall(struct.pack("<8sH32s", b"MOTLEYHS", 9, bytes(32))),
        lambda s: None,
    ]
    for number in range(100):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            attacks[number % len(attacks)](connection)
    assert "model files that cannot be right" in refusal(server)


def test_garbage_after_the_handshake_leaves_a_worker_alive(server: WorkerServer) -> None:
    rng = random.Random(2)
    for kind in Kind:
        channel = connect(server.address, SECRET)
        channel.send(kind, rng.randbytes(rng.randint(0, 100)))
        channel.close()
    channel = connect(server.address, SECRET)
    channel._connection.sendall(struct.pack("<II", 1, 2**32 - 1))  # four gigabytes are announced
    with pytest.raises((EOFError, OSError)):
        channel.receive()
    assert "model files that cannot be right" in refusal(server)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_other_addresses_need_a_secret(listen: str) -> None:
    with pytest.raises(ConfigError, match="needs a secret"):
        WorkerServer(listen)


def test_nothing_is_pickled() -> None:
    folder = Path(opening.__file__).parent
    for path in folder.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        for word in ("pickle", "eval(", "exec(", "object_list", "torch.load"):
            assert word not in source, (path, word)


def test_an_opening_survives_json() -> None:
    given_opening = asked("m")
    through = opening.Opening.from_json(json.loads(json.dumps(given_opening.as_json())))
    assert through == given_opening
    assert replace(through, rank=1).members == (1,)


def test_the_flags_of_commands_are_plain_values() -> None:
    """`motley serve` sends them to its engine's process."""
    arguments = LoadOptions(device="cpu,cpu@host", secret_file=Path("secret"), wire="q8").arguments()
    assert json.loads(json.dumps(arguments))["secret_file"] == "secret"
    assert arguments["wire"] == "q8"
