"""What a CPU's part of a prompt would take while a GPU copies the other experts of the layer from its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from motley import LLM
from motley.graph import Tensor
from motley.graph.ops import ExpertFfn, Weight
from motley.models import BatchShape
from motley.runtime.crossover import _product_seconds

_COPIED = 16 << 30  # bytes under way beside the CPU: a third of a second
_PORTION = 32 << 20


def cpu_beside_copies(llm: LLM, n_rows: int) -> dict[str, Any]:
    """Milliseconds that the CPU of a crew takes for the experts of its first layer, by rows: alone, and while pinned
    memory is copied to the GPU. A tenth of the experts gets about a tenth of the rows, and is read faster than all of
    them, which these rows use: an upper bound.
    """
    return llm._call(lambda: _measure(llm, n_rows))  # on the engine's thread: it may be at work on idle tasks


def _measure(llm: LLM, n_rows: int) -> dict[str, Any]:
    loaded = llm._loaded
    split, worker = loaded.split, loaded.runner.local
    owner, borrower = split.crew.lender, split.crew.borrower
    if owner is None or borrower is None:
        return {"nothing is lent": loaded.details}
    device = worker._backends[borrower].device
    found: dict[str, Any] = {}
    for n in (n_rows // 10, n_rows // 5, n_rows):
        graph = split.share(owner, BatchShape(n, 1), lends=False).graph
        node = next(each for each in graph.nodes if isinstance(each.op, ExpertFfn))

        def run(node: Tensor = node) -> float:
            return _on_thread_of(
                worker,
                owner,
                lambda: _product_seconds(
                    node, worker._backends[owner], worker._weights[owner], time.perf_counter
                ),
            )

        own = {t.name for t in node.inputs if isinstance(t.op, Weight)}
        row = {"alone_ms": round(1e3 * median(run() for _ in range(3)), 2), "weights": len(own)}
        if device.type == "cuda":
            seconds, rate = _beside_copies(run, device)
            row |= {"beside_ms": round(1e3 * seconds, 2), "copies_gb_s": round(rate / 1e9, 1)}
        found[f"{n} rows"] = row
    return found


def _on_thread_of(worker: Any, device: int, work: Callable[[], float]) -> float:
    """A CPU's programs belong to its thread."""
    index = worker.members.index(device)
    results = worker._group.run(lambda i: work() if i == index else 0.0)
    return float(results[index])


def _beside_copies(run: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """The median of `run` while copies are under way, and bytes a second of these."""
    source = torch.empty(_PORTION, dtype=torch.uint8, pin_memory=True)
    target, stream = torch.empty_like(source, device=device), torch.cuda.Stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        begin.record()
        for _ in range(_COPIED // _PORTION):
            target.copy_(source, non_blocking=True)
        end.record()
    times = []
    while not end.query() or not times:
        times.append(run())
    end.synchronize()
    return median(times[:-1] or times), _COPIED / begin.elapsed_time(end) * 1e3
