"""Experts that a GPU borrows from the CPU for batches of many rows.

A CPU that has the routed experts of some layers computes few rows as fast as it reads the chosen experts. A prompt uses
all experts, and has to be multiplied by them: a GPU does that faster, even though it has to copy the packed weights
first, layer by layer, from the mapped file. Which way a batch takes depends only on its number of rows.
"""

from __future__ import annotations

import logging
import mmap
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from motley.backends import Backend, LoadedWeight
from motley.errors import ConfigError
from motley.formats import PackedTensor
from motley.gguf import ModelSpec
from motley.graph import Graph, Tensor
from motley.graph.ops import Weight
from motley.graph.roles import ROUTER
from motley.models import BatchShape
from motley.runtime.budget import host_bytes
from motley.runtime.crew import Crew
from motley.runtime.crossover import MIN_ROWS, measured_rows
from motley.runtime.loading import packed_bytes, part_of
from motley.runtime.splitting import ModelSplit
from motley.split.lent_layers import LentLayers, lent_weights_of
from motley.split.placement import LAYER, role_of

_log = logging.getLogger(__name__)

# Rows from which copying costs less, where it cannot be measured (see `crossover`). It is about right for 15 cores and
# PCIe 5 (55 GB/s): Qwen3-30B-A3B's experts take 21 ms a layer for 512 rows, of which 4 ms are the bytes, copying 6 ms.
_USUAL_ROWS = 96
_VARIABLE = "MOTLEY_BORROW_ROWS"  # another number of rows, which is not measured then; 0: never
_SPARE_BYTES = 4 << 30  # of the host, beside the experts and the pages of their file


def settle_lending(crew: Crew, backends: Sequence[Backend], split_of: Callable[[], ModelSplit]) -> Crew:
    """The crew in which its only device with a share borrows the experts of its CPU, if that is possible: both devices
    are in this process, and the host has memory for the file's pages beside the CPU's repacked experts. `split_of()`:
    the model's split over the crew.
    """
    apart = crew.apart
    n_rows = _min_rows()
    if apart is None and n_rows:
        return _with_lent_layers(crew, backends, split_of, n_rows)
    if apart is None or apart.owner is None or not apart.n_layers or crew.groups or crew.hosts or not n_rows:
        return crew
    sharing = [device for device, share in enumerate(crew.shares) if share]
    if len(sharing) != 1 or sharing[0] == apart.owner:
        return crew
    owned = split_of().share(apart.owner, BatchShape(1, 1), lends=False).graph.weights
    if not _fits_twice(owned):
        return crew
    borrower = backends[sharing[0]]
    experts = [weight for weight in owned if len(weight.shape) == 3]
    is_possible = all(not _is_cut(weight.op) and borrower.can_borrow(weight) for weight in experts)
    if not experts or not is_possible:  # none: the first layers are dense
        return crew
    return replace(crew, apart=replace(apart, borrower=sharing[0], min_rows=n_rows))


def _with_lent_layers(
    crew: Crew, backends: Sequence[Backend], split_of: Callable[[], ModelSplit], n_rows: int
) -> Crew:
    """The crew of a GPU and a CPU by layers, in which the GPU borrows the CPU's weights, if that is possible."""
    if crew.mode != LAYER or len(crew) != 2 or not all(crew.shares) or crew.hosts or crew.groups:
        return crew
    borrowers = [device for device, backend in enumerate(backends) if not backend.has_native_collectives]
    if len(borrowers) != 1:
        return crew
    lent = LentLayers(1 - borrowers[0], borrowers[0], n_rows)
    split = split_of()
    layers = lent_weights_of(split.graph(BatchShape(1, 1)).weights, split.placement.states, lent)
    matrices = [w for w in layers if len(w.shape) > 1 and role_of(w).group != ROUTER]
    borrower = backends[lent.borrower]
    is_whole = not any(_is_cut(weight.op) for weight in layers)
    has_states = split.params.delta is not None
    if not matrices or has_states or not is_whole or not all(map(borrower.can_borrow, matrices)):
        return crew
    return replace(crew, lent=lent) if _fits_twice(layers) else crew


def _fits_twice(weights: Sequence[Tensor]) -> bool:
    """Whether the host has memory for these weights' pages of the file beside the weights themselves."""
    memory = host_bytes()
    return memory is None or 2 * sum(map(packed_bytes, weights)) + _SPARE_BYTES <= memory


def _is_cut(op: object) -> bool:
    """Whether a weight is a part of a tensor of the file."""
    return isinstance(op, Weight) and (op.middle is not None or bool(op.rows))


def _min_rows() -> int:
    """The fewest rows that may be lent for: those that the user says, or those that can be measured."""
    given = _given_rows()
    return MIN_ROWS if given is None else given


def _given_rows() -> int | None:
    text = os.environ.get(_VARIABLE)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"{_VARIABLE} is {text!r}", hint="give a number of rows; 0: never")
    return None if text is None else int(text)


def settle_rows(
    split: ModelSplit, backends: Mapping[int, Backend], weights: Mapping[int, Mapping[str, LoadedWeight]]
) -> None:
    """Measures from how many rows on batches are lent for, unless the user says it. To be called by the owner's thread,
    before a plan of so many rows is made. `backends`, `weights`: by device; the borrower's include what it borrows.
    """
    owner, borrower = split.crew.lender, split.crew.borrower
    if owner is None or borrower is None or not split.lends or _given_rows() is not None:
        return

    def graph_of(n_rows: int) -> Graph:
        return split.share(owner, BatchShape(n_rows, 1), lends=False).graph

    own = weights[owner]
    borrowed = {name: weight for name, weight in weights[borrower].items() if name in own}
    try:
        rows = measured_rows(graph_of, (backends[owner], own), (backends[borrower], borrowed))
    except Exception as error:  # a model must not fail to load for that
        _log.warning("rows from which copies pay were not measured: %s", error)
        rows = None
    split.lend_from(_USUAL_ROWS if rows is None else rows)


def lent_weights(
    split: ModelSplit, device: int, backend: Backend, own: Sequence[str]
) -> dict[str, LoadedWeight]:
    """The weights that a device borrows, by name: matrices stay in the file, anything small is loaded, routers too.

    `own`: the names of those that it has.
    """
    if split.crew.borrower != device:
        return {}
    share = split.lent_share(device)
    missing = [node for node in share.graph.weights if node.name not in own]
    ops = {node.name: node.op for node in missing if isinstance(node.op, Weight)}
    files = _Files(split.spec)
    matrices = [node for node in missing if _is_copied(split, node)]
    borrowed = backend.borrow(
        {node.name: files.tensor(ops[node.name].source) for node in matrices}, split.crew.n_lent_ahead
    )
    if borrowed is None:
        split.stop_lending()
        _log.warning(
            "pages of the model file cannot be pinned: the CPU computes with its weights in all batches"
        )
        return {}
    lent = dict(borrowed)
    for node in missing:
        if node.name not in lent:
            op = ops[node.name]
            part = part_of(split.spec.tensor(op.source), share.layouts[node.name], device, op.rows)
            lent[node.name] = backend.load(part)
    backend.finish_loading()
    return lent


def lent_stand_ins(
    split: ModelSplit, device: int, backend: Backend, own: Sequence[str]
) -> dict[str, LoadedWeight]:
    """The same weights without contents, for a stand-in (`Backend.stand_in`). Nothing is copied or loaded."""
    if split.crew.borrower != device:
        return {}
    missing = [node for node in split.lent_share(device).graph.weights if node.name not in own]
    return {
        node.name: backend.borrowed_like(node) if _is_copied(split, node) else backend.weight_like(node)
        for node in missing
    }


def _is_copied(split: ModelSplit, weight: Tensor) -> bool:
    """Whether a borrowed weight stays in the file, and is copied for each batch."""
    is_matrix = (2, 3) if split.crew.lent is not None else (3,)
    return len(weight.shape) in is_matrix and role_of(weight).group != ROUTER


class _Files:
    """A model's files, mapped once more: read-only and shared, so that a GPU can read the system's own pages.

    The spec's mapping is private. Pinning its pages could copy them.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._mapped: dict[int, mmap.mmap] = {}

    def tensor(self, name: str) -> PackedTensor:
        info = self._spec.tensors[name]
        if info.part not in self._mapped:
            with self._spec.parts[info.part].path.open("rb") as file:
                self._mapped[info.part] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = _read_only(self._mapped[info.part], info.nbytes, info.offset)
        row_bytes = info.format.row_bytes(info.shape[-1])
        return PackedTensor(data.view(*info.shape[:-1], row_bytes), info.format)


def _read_only(file: mmap.mmap, n_bytes: int, offset: int) -> torch.Tensor:
    """Bytes of a file as a tensor, which must not be written to: torch has no such tensors, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(file, dtype=torch.uint8, count=n_bytes, offset=offset)
