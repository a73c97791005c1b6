"""Whether the kernels of crews with a GPU are those that stand-ins record, and whether its batches need others.

A process of its own: it needs TRITON_INTERPRET=0. Writes small models to the folder that is given; the GPU is not
there. Prints what differs, and fails then. The last lines: for each crew whether there are kernels, the layers that are
recorded, and those of the kernels that only a crew with a CPU has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import compile_kernels
import numpy as np
import torch
from triton.runtime import driver

from motley.backends import Backend, get_backend
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.compiling import Job, recording
from motley.bench import random_model, write_random_model
from motley.bench.shapes import ExpertShape, Shape
from motley.gguf import read_spec
from motley.kvcache.arena import GroupBatch, SequenceTable
from motley.kvcache.types import get_cache_type
from motley.models import N_EXPERT_USED, BatchShape, read_params
from motley.runtime import CacheConfig, Runner, fit_cache, make_crew, split_model
from motley.runtime.batch import PlacedBatch
from motley.runtime.lending import settle_lending
from motley.runtime.rehearsals import inert_batch, tiers
from motley.runtime.stand_in_runner import StandInRunner, layers_to_record, stand_in_runner

DENSE = Shape(6, 256, 512, 4, 2, 64, 512, n_ctx=256)
EXPERTS = replace(DENSE, architecture="qwen3moe", experts=ExpertShape(6, 2, 256), n_layers=4)
N_BATCH, N_PARALLEL, BLOCK = 64, 4, 32
ONLY_BESIDE_A_CPU = ("_advance", "_post", "_fetch", "_repack_q4_k")
# Rows of each sequence in a batch: decoding, prompts, both, and short chunks.
BATCHES = [
    [1],
    [2],
    [5],
    [8],
    [9],
    [17],
    [40],
    [64],
    [1] * 2,
    [1] * 4,
    [3, 1, 1],
    [30, 1, 1],
    [60, 1],
    [20, 20, 20],
]


@dataclass(frozen=True)
class Case:
    """A crew of a GPU and a CPU, on which a model is recorded."""

    name: str
    shape: str
    options: dict[str, Any]
    gpus: tuple[int, ...] = (0,)  # which of the two devices are on the GPU


CASES = (
    Case("layer", "dense", {"split_mode": "layer", "tensor_split": (2, 1)}),
    Case("cpu_first", "dense", {"split_mode": "layer", "tensor_split": (1, 2)}, (1,)),
    Case("tensor", "dense", {"split_mode": "tensor", "tensor_split": (1, 1)}),
    Case("experts", "experts", {"n_cpu_moe": 99}),
    Case("some_experts", "experts", {"n_cpu_moe": 1}),
    Case("shared_experts", "experts", {"n_cpu_moe": 99, "expert_split": (1, 1)}),
    Case("virtual_tensor", "dense", {"split_mode": "tensor", "tensor_split": (3, 1)}, (0, 1)),
    Case("virtual_layer", "dense", {"split_mode": "layer", "tensor_split": (1, 1)}, (0, 1)),
    Case("expert_layers", "experts", {"split_mode": "layer", "tensor_split": (1, 1)}),
)


def placed(rows: Sequence[int], n_groups: int, extra: dict[str, int]) -> PlacedBatch:
    """Sequences with some context, as the cache would place them; each wants the logits of its last row."""
    tables, first = [], 0
    for number, n in enumerate(rows):
        position = 5 + 3 * number
        blocks = np.arange(-(-(position + n) // BLOCK), dtype=np.int32)
        tables.append(SequenceTable(first, n, position, 0, blocks))
        first += n
    positions = torch.cat([torch.arange(t.position, t.position + t.n_rows) for t in tables]).int()
    inputs = {"positions": positions, "output_rows": torch.tensor(rows).cumsum(0).int() - 1}
    inputs |= {name: torch.full((first,), value, dtype=torch.int32) for name, value in extra.items()}
    batch = GroupBatch.of(tables, BLOCK)
    return PlacedBatch(BatchShape(first, len(rows)), inputs, (batch,) * n_groups)


def compare(case: Case, path: Path) -> tuple[int, str]:
    """How many kernels differ, and what is said about the crew."""
    spec, kind = read_spec(path), get_cache_type("q8_0")
    params, config = read_params(spec), CacheConfig(kind, kind, block_size=BLOCK)
    crew = make_crew("cpu,cpu", **case.options)
    if crew.apart is not None:
        crew = replace(
            crew, apart=replace(crew.apart, n_layers=min(crew.apart.n_layers or 0, params.n_layers))
        )
    backends: list[Backend] = [get_backend("cpu"), get_backend("cpu")]
    for gpu in case.gpus:
        backends[gpu] = CudaBackend("cpu", captures=False)

    def split_over(crew: Any) -> Any:
        return split_model(spec, params, crew, config, n_ctx=128, rotate=True)

    crew = settle_lending(crew, backends, lambda: split_over(crew))
    split = split_over(crew)
    fit = fit_cache(split, [get_backend("cpu")] * 2, config, n_batch=N_BATCH, n_parallel=N_PARALLEL)
    extra = {} if params.experts is None else {N_EXPERT_USED: params.experts.n_used}
    devices, lendings = case.gpus, (False,) if crew.borrower is None else (False, True)
    n_layers = layers_to_record(split, devices)

    def record(runner: Runner | StandInRunner, n_layers: int) -> dict[Job, None]:
        jobs: dict[Job, None] = {}
        for tier in tiers(N_BATCH, N_PARALLEL):
            for shape, longest in tier.shapes:
                batch = inert_batch(replace(shape, n_layers=n_layers), longest, fit.plan, extra)
                for lends in lendings if shape.n_tokens >= crew.min_lent_rows else (False,):
                    with recording(jobs):
                        runner.record(batch, devices, lends)
        return jobs

    twin = stand_in_runner(split, backends, fit.plan, [None, None])
    assert twin is not None
    early = record(twin, n_layers)
    twin.close()
    runner = Runner(split, backends, fit.plan)
    known = record(runner, 0)
    differing = early.keys() ^ known.keys()
    for job in differing:
        print(f"{case.name}: {'missed' if job in known else 'needless'}: {job.name} {job.data}")
    n_unknown = 0
    for rows in BATCHES:
        for n_rows in (1, 10**6):  # weights are borrowed as early, or as late, as may be measured
            met: dict[Job, None] = {}
            split.lend_from(n_rows)
            with recording(met):
                runner.record(placed(rows, len(fit.plan.groups), extra), devices, None)
            for job in met.keys() - early.keys():
                print(f"{case.name}: a batch of {rows} compiles {job.name}: {job.data}")
                n_unknown += 1
    runner.close()
    names = {job.name for job in early}
    only = ",".join(name for name in ONLY_BESIDE_A_CPU if name in names)
    return len(differing) + n_unknown, f"{case.name}: {bool(early)} {n_layers} {only}"


def main() -> int:
    os.environ.pop("MOTLEY_BORROW_ROWS", None)
    driver.set_active(compile_kernels.NoGpu(90))
    launched = compile_kernels.note_launches()
    folder = Path(sys.argv[1])
    random_model.SHAPES = {"dense": DENSE, "experts": EXPERTS}
    paths = {name: folder / f"{name}.gguf" for name in random_model.SHAPES}
    for name, path in paths.items():
        write_random_model(path, name, "Q4_K", finer="Q6_K")
    chosen = [case for case in CASES if case.name in sys.argv[2:] or len(sys.argv) == 2]
    found = [compare(case, paths[case.shape]) for case in chosen]
    print(f"launched: {launched}")
    print(*(said for _, said in found), sep="\n")
    return int(any(n for n, _ in found) or bool(launched))


if __name__ == "__main__":
    sys.exit(main())
