"""Virtual devices of one GPU in lockstep, under Triton's interpreter: the same answer as one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from cuda_models import DIM, SIZE, inputs_of, make_batch, make_spec, use_few_programs
from recorded_graphs import RecordingPool

from motley.backends import Executable, join
from motley.backends.cuda import backend as backend_module
from motley.backends.cuda import runs, steps
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.collectives import run_collective
from motley.backends.cuda.values import Values
from motley.errors import DeviceError
from motley.graph import CACHE, F32, Tensor
from motley.graph.ops import Input, cache_layer
from motley.kvcache.arena import Arena, GroupBatch, LayerGroup
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, GraphOptions, read_params
from motley.ownership import Word
from motley.plan import DevicePlan, Kernel
from motley.runtime.crew import make_crew
from motley.runtime.group import CollectiveKernel, PartSizes
from motley.runtime.loading import part_of
from motley.runtime.splitting import ModelSplit
from motley.split.collectives import AllGather, AllReduce, Broadcast, ReduceScatter

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

N_LAYERS = 2


class Echo:
    """A line to somebody who always has the same as this device."""

    device = 0
    n_devices = 2

    def exchange(self, part: torch.Tensor | None, sizes: PartSizes) -> Sequence[torch.Tensor | None]:
        return [part, part]


class Member:
    """One device of a crew: its executable and its cache."""

    def __init__(self, split: ModelSplit, weights: dict[str, Any], device: int, shape: BatchShape) -> None:
        backend = CudaBackend("cpu")
        share = split.share(device, shape)
        loaded = {
            node.name: backend.load(part_of(weights[node.op.source], share.layouts[node.name], device))
            for node in share.graph.weights
        }
        heads = {cache_layer(n): n.shape[0] for n in share.graph.inputs if n.dtype == CACHE}
        group = LayerGroup(tuple(range(N_LAYERS)), tuple(heads.get(i, 0) for i in range(N_LAYERS)), 8)
        kind = get_cache_type("q8_0")
        self.arena = Arena(kind, kind, [group], block_size=SIZE, head_dim=DIM)
        self.layers = {
            n.name: self.arena.layer(cache_layer(n)) for n in share.graph.inputs if n.dtype == CACHE
        }
        kernels: tuple[Kernel, ...] = (CollectiveKernel(Echo()), *backend.kernels)  # type: ignore[arg-type]
        self.executable: Executable = backend.prepare(DevicePlan.of(share.graph, kernels), loaded)

    def inputs(self, batch: GroupBatch, rows: list[int]) -> dict[str, Any]:
        self.arena.prepare([batch], [])
        return {name: layer.on(batch) for name, layer in self.layers.items()} | inputs_of(batch, rows)


def make_members(devices: str, mode: str | None, shape: BatchShape) -> list[Member]:
    spec, weights = make_spec("F16", n_layers=N_LAYERS, n_heads=4, n_kv_heads=2)
    options = GraphOptions(128, k_rotation=DIM, v_rotation=DIM)
    split = ModelSplit(spec, read_params(spec), make_crew(devices, mode), options)
    return [Member(split, weights, device, shape) for device in range(len(split.crew))]


def answers(devices: str, mode: str | None) -> list[list[torch.Tensor]]:
    """Of each device, the logits of a prompt of three tokens and of one after it."""
    prompt, tail = (make_members(devices, mode, BatchShape(n, 1)) for n in (3, 1))
    for first, second in zip(prompt, tail, strict=True):
        second.arena, second.layers = first.arena, first.layers
    found: list[list[torch.Tensor]] = [[] for _ in prompt]
    for members, n_context, n_new in ((prompt, 3, 3), (tail, 4, 1)):
        joint = join([member.executable for member in members])
        assert joint is not None
        batch = make_batch([n_context], [n_new])
        outputs = joint.run([member.inputs(batch, [n_new - 1]) for member in members])
        for own, (logits,) in zip(found, outputs, strict=True):
            own.append(logits.clone())
    return found


@pytest.mark.parametrize(
    ("devices", "mode"), [("cpu,cpu", "tensor"), ("cpu,cpu", "layer"), ("(cpu,cpu),(cpu)", None)]
)
def test_devices_in_lockstep_answer_as_one(
    devices: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_programs(monkeypatch)
    (expected,) = answers("cpu", None)
    first, *others = answers(devices, mode)
    for index, (alone, one) in enumerate(zip(expected, first, strict=True)):
        assert all(torch.equal(one, other[index]) for other in others)
        assert float((one - alone).norm() / alone.norm()) < 2e-2


def test_a_device_with_neighbours_elsewhere_talks_through_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that compute the same: what one alone gets if its line echoes, lockstep gets as well."""
    use_few_programs(monkeypatch)
    batch = make_batch([1], [1])
    member = make_members("cpu,cpu", "tensor", BatchShape(1, 1))[0]
    (echoed,) = member.executable.run(member.inputs(batch, [0]))
    twins = [make_members("cpu,cpu", "tensor", BatchShape(1, 1))[0] for _ in range(2)]
    joint = join([twin.executable for twin in twins])
    assert joint is not None
    together = joint.run([twin.inputs(batch, [0]) for twin in twins])
    assert torch.equal(together[0][0], echoed)


def test_a_step_that_runs_out_of_memory_ends_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    members = make_members("cpu,cpu", "tensor", BatchShape(1, 1))
    joint = join([member.executable for member in members])
    assert joint is not None
    batch = make_batch([1], [1])
    with monkeypatch.context() as broken:
        broken.setattr(
            steps, "rms_norm", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. 9 GiB"))
        )
        with pytest.raises(DeviceError, match="cpu has run out of memory: CUDA out of memory"):
            joint.run([member.inputs(batch, [0]) for member in members])
        broken.setattr(steps, "rms_norm", Mock(side_effect=RuntimeError("an illegal access")))
        with pytest.raises(DeviceError, match="cpu has failed: an illegal access"):
            joint.run([member.inputs(batch, [0]) for member in members])
    ((one,), (other,)) = joint.run([member.inputs(batch, [0]) for member in members])
    assert bool(one.isfinite().all())
    assert torch.equal(one, other)


@pytest.mark.parametrize("what", ["load", "Program"])
def test_memory_that_ends_while_a_model_is_loaded_or_a_plan_is_made_is_an_error_of_the_device(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, what, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(DeviceError, match="cpu has run out of memory"):
        make_members("cpu", None, BatchShape(1, 1))


def test_collectives_in_one_memory() -> None:
    parts = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])]
    word = Word.run([1, 2])

    def nodes(*ops: Any) -> list[Tensor]:
        return [op(Input((3,), F32)(name="x")) for op in ops]

    total = torch.tensor([11.0, 22.0, 33.0])
    assert all(
        torch.equal(result, total) for result in run_collective(nodes(AllReduce(), AllReduce()), parts)
    )
    scattered = run_collective(nodes(ReduceScatter(0, word, 0), ReduceScatter(0, word, 1)), parts)
    assert [result.tolist() for result in scattered] == [[11.0], [22.0, 33.0]]
    pieces = [torch.tensor([5.0]), torch.tensor([6.0, 7.0])]
    gathered = run_collective([AllGather(0, word)(Input((n,), F32)(name="x")) for n in (1, 2)], pieces)
    assert [result.tolist() for result in gathered] == [[5.0, 6.0, 7.0]] * 2
    shared = run_collective(
        [Broadcast(1, (3,))(), Broadcast(1, (3,))(Input((3,), F32)(name="x"))], [None, parts[1]]
    )
    assert all(torch.equal(result, parts[1]) for result in shared)
    word = Word.concat([Word.of(2, 1), Word.of(4, 2)])
    group = [AllGather(0, word, members=(2, 4))(Input((n,), F32)(name="x")) for n in (1, 2)]
    assert [found.tolist() for found in run_collective(group, pieces, (2, 4))] == [[5.0, 6.0, 7.0]] * 2


def test_a_sum_is_made_by_its_first_reader() -> None:
    node = AllReduce()(Input((1, 32), F32)(name="x"))
    parts, values = [torch.randn(1, 32) for _ in range(2)], Values({})
    values.put_sum(node, parts)
    assert values.addends(node) == (parts[0], parts[1])
    assert torch.equal(values.plain(node), parts[0] + parts[1])
    assert values.addends(node) is None
    values.put_sum(node, [*parts, parts[0]])  # no kernel adds three
    assert values.addends(node) is None
    assert torch.equal(values.plain(node), parts[0] + parts[1] + parts[0])
    values.put_sum(node, parts)
    values.forget([node])
    assert values.addends(node) is None


def test_addends_are_kept_until_all_lanes_have_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that has made its sum must not get the memory of an addend which another lane still reads."""
    use_few_programs(monkeypatch)
    members = make_members("cpu,cpu", "tensor", BatchShape(1, 1))
    joint = join([member.executable for member in members])
    assert isinstance(joint, runs.JointRun)
    live: list[list[weakref.ref[torch.Tensor]]] = []
    collectives = runs._run_collectives

    def noted(nodes: Any, values: Any, messages: Any, addends: list[torch.Tensor]) -> list[int]:
        assert all(ref() is not None for refs in live[-1:] for ref in refs)
        ready = collectives(nodes, values, messages, addends)
        live.append([weakref.ref(part) for part in addends])
        return ready

    monkeypatch.setattr(runs, "_run_collectives", noted)
    batch = make_batch([1], [1])
    joint.run([member.inputs(batch, [0]) for member in members])
    assert sum(len(refs) == 2 for refs in live) == 2 * N_LAYERS


def test_a_batch_that_cannot_be_captured_for_want_of_memory_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In lockstep nobody else has seen the half of it that was captured. With neighbours elsewhere it is an error."""
    use_few_programs(monkeypatch)
    tries = []

    def no_memory(parts: Iterable[Any], pool: Any) -> None:
        tries.append(pool)
        for work, _ in parts:
            work()  # a capture gets as far as the end, say
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(runs, "Captured", no_memory)
    batch, (member,) = make_batch([1], [1]), make_members("cpu", None, BatchShape(1, 1))
    joint = join([member.executable])
    assert isinstance(joint, runs.JointRun)
    joint._captures, joint._pool = True, RecordingPool()  # type: ignore[assignment]
    logits = [joint.run([member.inputs(batch, [0])])[0][0].clone() for _ in range(4)]
    assert all(torch.equal(row, logits[0]) for row in logits)
    assert len(tries) == 1

    alone = runs.ThreadRun(joint._programs)
    alone._captures, alone._pool = True, RecordingPool()  # type: ignore[assignment]
    alone.run([member.inputs(batch, [0])])
    with pytest.raises(DeviceError, match="out of memory"):
        alone.run([member.inputs(batch, [0])])


def test_steps_with_drafts_are_captured_once_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are those that `Backend.layout` tells, by which the engine knows whether one has to be captured.

    No kernel runs: what is launched, captured and replayed is counted.
    """
    done: list[str] = []

    class Captured:
        def __init__(self, parts: Any, pool: Any) -> None:
            done.append("captured")

        def replay(self) -> None:
            done.append("replayed")

    monkeypatch.setattr(runs, "Captured", Captured)
    monkeypatch.setattr(runs.JointRun, "execute", lambda self, values: done.append("launched"))
    monkeypatch.setattr(runs.Run, "_take", lambda self, values: [])
    (member,) = make_members("cpu", None, BatchShape(8, 8))
    joint = join([member.executable])
    assert isinstance(joint, runs.JointRun)
    joint._captures, joint._pool = True, RecordingPool()  # type: ignore[assignment]
    backend, layouts = CudaBackend("cpu"), set()
    for rows in ([8], [5], [7], [4, 4], [3, 5], [1] * 8, [2] * 4):
        batch, layout = (
            make_batch([n + 2 for n in rows], rows),
            backend.layout(sum(rows), len(rows), max(rows)),
        )
        done.clear()
        for _ in range(3):
            joint.run([member.inputs(batch, list(range(sum(rows))))])
        is_new = layout not in layouts
        assert done == (["launched", "captured", "replayed"] if is_new else ["replayed"] * 3), rows
        layouts.add(layout)
    assert len(layouts) == 5
