"""Activation memory: no two tensors that are alive together overlap, and memory is reused."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from motley.graph import F32, Graph, Tensor
from motley.graph.ops import Add, Input, Reshape, Scale
from motley.plan import MemoryLayout, base_of, fuse, owns_memory, value_buffers
from motley.plan import lay_out as lay_out_buffers
from thorough import examples


def lay_out(graph: Graph) -> MemoryLayout[Tensor]:
    """Of a graph whose nodes are all stages of their own."""
    return lay_out_buffers(value_buffers(fuse(graph, lambda stage: False), graph.outputs))


def chain(n: int) -> Graph:
    x = Input((16, 16), F32)(name="x")
    for _ in range(n):
        x = Scale(2.0)(x)
    return Graph.of(x)


def test_a_chain_needs_two_buffers_however_long() -> None:
    assert lay_out(chain(50)).n_bytes == 2 * 16 * 16 * 4


def test_views_share_their_base_and_keep_it_alive() -> None:
    x = Scale(2.0)(Input((4, 4), F32)(name="x"))
    view = Reshape((16,))(x)
    other = Scale(3.0)(x)  # last direct use of x; the view is used later
    flat = Reshape((16,))(other)
    graph = Graph.of(Add()(flat, view))
    layout = lay_out(graph)
    assert layout.offsets[x] != layout.offsets[other]
    assert view not in layout.offsets
    assert_no_overlap(graph)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    tensors = [Input((4, 4), F32)(name="x")]
    for _ in range(draw(st.integers(1, 25))):
        a, b = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        kind = draw(st.sampled_from(["scale", "add", "reshape"]))
        if kind == "add" and a.shape == b.shape:
            tensors.append(Add()(a, b))
        elif kind == "reshape":
            tensors.append(Reshape((16,) if a.shape == (4, 4) else (4, 4))(a))
        else:
            tensors.append(Scale(0.5)(a))
    return Graph.of(*draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3, unique=True)))


@settings(max_examples=examples(300), deadline=None)
@given(graphs())
def test_tensors_alive_together_never_overlap(graph: Graph) -> None:
    assert_no_overlap(graph)


def assert_no_overlap(graph: Graph) -> None:
    """Replay the graph: an owner's bytes must be nobody else's from its step to its last reader."""
    layout = lay_out(graph)
    holder: dict[int, Tensor] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            assert_intact(tensor, layout.offsets, holder)
        if owns_memory(node):
            start = layout.offsets[node] // 4
            assert start + node.n_values <= layout.n_bytes // 4
            holder.update(dict.fromkeys(range(start, start + node.n_values), node))
    for tensor in graph.outputs:
        assert_intact(tensor, layout.offsets, holder)


def assert_intact(tensor: Tensor, offsets: Mapping[Tensor, int], holder: dict[int, Tensor]) -> None:
    base = base_of(tensor)
    if owns_memory(base):
        start = offsets[base] // 4
        assert all(holder[i] is base for i in range(start, start + base.n_values))
