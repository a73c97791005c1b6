"""Whether the rehearsal of a model meets every kernel that its batches will launch.

A process of its own: it needs TRITON_INTERPRET=0. The bundled model on a GPU that is not there: kernels are recorded
and never launched. Prints what a batch would compile that the rehearsal has not met, and fails then. With an argument
it also compiles some of what was recorded, by other processes, and checks that launches find it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import compile_kernels
import numpy as np
import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

import motley
from motley import compile_process, milestones
from motley.backends import get_backend
from motley.backends.cuda import compile_worker
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.compiling import Compiler, Job, Target, recording
from motley.backends.cuda.manifests import Manifest
from motley.backends.cuda.sampler import DeviceSampler, RowSettings
from motley.gguf import read_spec
from motley.kvcache.arena import GroupBatch, SequenceTable
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, read_params
from motley.runtime import CacheConfig, Runner, fit_cache, make_crew, split_model
from motley.runtime.batch import PlacedBatch
from motley.runtime.rehearsals import inert_batch, tiers

MODEL = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"
N_BATCH, SIZE = 256, 32
# Rows of each sequence in a batch: decoding, prompts, both, and short chunks.
BATCHES = [[1] * n for n in (1, 2, 3, 5, 8, 9, 16, 17, 33, 48, 65, 100, 128)] + [
    [9], [16], [20], [64], [65], [100], [200], [256], [1] * 5 + [30], [8], [3, 1, 1], [130, 20, 1], [2], [5],
    [16] * 4, [4] * 9, [2] * 30, [16, 1], [17, 1],
]  # fmt: skip


def placed(rows: list[int]) -> PlacedBatch:
    """Sequences with some context, as the cache would place them; each wants the logits of its last row."""
    tables, first = [], 0
    for number, n in enumerate(rows):
        position = 5 + 3 * number
        blocks = np.arange(-(-(position + n) // SIZE), dtype=np.int32)
        tables.append(SequenceTable(first, n, position, 0, blocks))
        first += n
    batch = GroupBatch.of(tables, SIZE)
    ends = torch.tensor(rows).cumsum(0).int() - 1
    positions = torch.cat([torch.arange(t.position, t.position + t.n_rows) for t in tables]).int()
    shape = BatchShape(sum(rows), len(rows))
    return PlacedBatch(shape, {"positions": positions, "output_rows": ends}, (batch,))


def main() -> int:
    driver.set_active(compile_kernels.NoGpu(90))
    known, unknown = rehearse(128, BATCHES)
    unknown += rehearse(128, [rows for rows in BATCHES if sum(rows) > 64], has_copies=True)[1]
    unknown += rehearse(1, [rows for rows in BATCHES if len(rows) == 1])[1]
    some = [*BATCHES, [7, 1], [2, 2, 4], [6], [1] * 4, [3]]
    for n_tiers, tier in enumerate(tiers(N_BATCH, 128)[:-1], 1):
        few = [rows for rows in some if sum(rows) <= (tier.max_rows or 0)]
        unknown += rehearse(128, few, n_tiers=n_tiers)[1]
        unknown += rehearse(1, [rows for rows in few if len(rows) == 1], n_tiers=n_tiers)[1]
    return bool(unknown) or (compiled_elsewhere(list(known)) if len(sys.argv) > 1 else 0)


def rehearse(
    n_parallel: int, batches: list[list[int]], *, has_copies: bool = False, n_tiers: int = 3
) -> tuple[dict[Job, None], int]:
    """What the rehearsal of a model meets, and how many kernels of `batches` are not among that."""
    spec, kind = read_spec(MODEL), get_cache_type("q8_0")
    config = CacheConfig(kind, kind, block_size=SIZE)
    split = split_model(spec, read_params(spec), make_crew("cpu"), config, n_ctx=512, rotate=True)
    backends = [CudaBackend("cpu", captures=False)]
    backends[0].copies.is_kept = has_copies
    fit = fit_cache(split, [get_backend("auto")], config, n_batch=N_BATCH, n_parallel=n_parallel)
    runner = Runner(split, backends, fit.plan)
    sampler = DeviceSampler(torch.device("cpu"))
    known: dict[Job, None] = {}
    all_tiers = tiers(N_BATCH, n_parallel)
    samples = n_tiers == len(all_tiers)  # before the last tier, tokens are chosen on the host
    with recording(known):
        shapes = [each for tier in all_tiers[:n_tiers] for each in tier.shapes]
        for shape, longest in shapes:
            logits = runner.run(inert_batch(shape, longest, fit.plan), [0] * shape.n_tokens, ())
            n = len(logits)
            if samples:
                sampler.launch(logits, [RowSettings(0.8, 40)] * n, [0] * n, {0: [0]})
    print(f"{len(known)} kernels")
    unknown = 0
    for rows in batches:
        met: dict[Job, None] = {}
        with recording(met):
            logits = runner.run(placed(rows), [1] * sum(rows), ())
            n = len(logits) if samples else 0
            if n:
                recent, biases = {i: [i] for i in range(n)}, {i: {i: 0.5} for i in range(n)}
                sampler.launch(logits, [RowSettings(0.7, 0, 0.9)] * n, range(n), recent, biases)
        for job in met.keys() - known.keys():
            print(f"a batch of {rows} compiles {job.name}: {job.data}")
            unknown += 1
    runner.close()
    return known, unknown


def compiled_elsewhere(jobs: list[Job]) -> int:
    """Compile some of the kernels in other processes; 1 if a launch here would compile one of them again."""
    quick = [job for job in jobs if job.name in ("_edit", "_convert", "_rms_norm", "_unpack")]
    compile_process.start_early(90, 227 << 10)  # as a command does, before it knows the model
    compiler = Compiler(Target(90, 227 << 10))
    compiler.submit(quick[:1])
    compiler.submit(quick[1:], is_urgent=False)
    manifest = Manifest("a model")
    compiler.send(manifest)
    first = compiler.wait(1)
    done = compiler.finish()
    compiler._reader.join(60)  # the process has ended
    compiler.close()
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    are_same = [has_its_launcher(job) for job in quick]
    print(f"{len(done)} compiled, found again: {hits}, with the launcher that was built before: {are_same}")
    is_taken = compile_process._early._process is None and milestones.since_start()[0][0] == "compiler ready"
    is_complete = is_taken and first == done[:1] and len(done) == len(quick) and manifest.exists
    is_right = is_complete and all(are_same) and all(hits)
    return int(not quick or not is_right or any(each.error for each in done))


def has_its_launcher(job: Job) -> bool:
    """Whether the launcher that is built beside a kernel's compilation is the one that the kernel needs."""
    function, sources = getattr(sys.modules[job.module], job.name), []
    nvidia.library_dirs = list  # there is no driver
    nvidia.compile_module_from_src = lambda src, **_: sources.append(src)
    compile_worker._build_launcher_early(function, job.data)
    kernel = function.preload(job.data)
    compile_worker._build_launcher(kernel.src, kernel.metadata)
    return len(sources) == 2 and sources[0] == sources[1]


if __name__ == "__main__":
    sys.exit(main())
