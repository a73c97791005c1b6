"""Whether kernels that are recorded with stand-ins for weights, and of a model's first layers, are those of the model.

A process of its own: it needs TRITON_INTERPRET=0. Writes small models of several kinds to the folder that is given, on
a GPU that is not there. Prints what differs, and fails then. The last line: recorded layers of each model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import compile_kernels
from triton.runtime import driver

import motley
from motley.backends import get_backend
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.compiling import Job, recording
from motley.bench import random_model, write_random_model
from motley.bench.shapes import DeltaShape, ExpertShape, Shape
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import N_EXPERT_USED, read_params
from motley.runtime import CacheConfig, Runner, fit_cache, make_crew, split_model
from motley.runtime.rehearsals import inert_batch, tiers
from motley.runtime.stand_in_runner import StandInRunner, layers_to_record, stand_in_runner

sys.path.insert(0, str(Path(__file__).parents[2]))
from random_models import GEMMA3

BUNDLED = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"
MIXED = Shape(8, 256, 512, 4, 2, 64, 512, n_ctx=256)
HYBRID = Shape(
    *(8, 64, 64, 2, 1, 32, 64),
    n_ctx=256,
    architecture="qwen3next",
    experts=ExpertShape(6, 2, 32, n_ff_shared=32),
    delta=DeltaShape(1, 2, 32, interval=2),
    n_rope=16,
)
N_BATCH, N_PARALLEL = 64, 4


def models(folder: Path) -> dict[str, Path]:
    random_model.SHAPES = {"mixed": MIXED, "hybrid": HYBRID}
    write_random_model(folder / "mixed.gguf", "mixed", "Q4_K", finer="Q6_K")
    write_random_model(folder / "plain.gguf", "mixed", "F16")
    write_random_model(folder / "hybrid.gguf", "hybrid", "Q8_0")
    GEMMA3.write(folder / "gemma3.gguf")
    made = {name: folder / f"{name}.gguf" for name in ("mixed", "plain", "hybrid", "gemma3")}
    return {"bundled": BUNDLED, **made}


def compare(path: Path) -> tuple[int, int]:
    """How many kernels differ, and how many layers were recorded."""
    spec, kind = read_spec(path), get_cache_type("q8_0")
    params, config = read_params(spec), CacheConfig(kind, kind, block_size=32, demand_paged=True)
    split = split_model(spec, params, make_crew("cpu"), config, n_ctx=128, rotate=True)
    backend = CudaBackend("cpu", captures=False)
    fit = fit_cache(split, [get_backend("auto")], config, n_batch=N_BATCH, n_parallel=N_PARALLEL)
    twin = stand_in_runner(split, [backend], fit.plan, [None])
    assert twin is not None
    n_layers = layers_to_record(split)
    extra = {} if params.experts is None else {N_EXPERT_USED: params.experts.n_used}

    def record(runner: Runner | StandInRunner, n_layers: int) -> dict[Job, None]:
        jobs: dict[Job, None] = {}
        for tier in tiers(N_BATCH, N_PARALLEL):
            for shape, longest in tier.shapes:
                some = replace(shape, n_layers=n_layers)
                with recording(jobs):
                    runner.record(inert_batch(some, longest, fit.plan, extra), [0], None)
        runner.close()
        return jobs

    early = record(twin, n_layers)
    known = record(Runner(split, [backend], fit.plan), 0)
    for job in early.keys() ^ known.keys():
        print(f"{path.name}: {'missed' if job in known else 'needless'}: {job.name} {job.data}")
    assert known, path
    return len(early.keys() ^ known.keys()), n_layers


def main() -> int:
    driver.set_active(compile_kernels.NoGpu(90))
    launched = compile_kernels.note_launches()
    found = {name: compare(path) for name, path in models(Path(sys.argv[1])).items()}
    print(f"launched: {launched}")
    print(" ".join(f"{name}:{n_layers}" for name, (_, n_layers) in found.items()))
    return int(any(n for n, _ in found.values()) or bool(launched))


if __name__ == "__main__":
    sys.exit(main())
