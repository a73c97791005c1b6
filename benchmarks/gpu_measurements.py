"""The measurements and tests of one GPU that `gpu_report` runs, in groups of less than nine minutes.

1   a GPU beside a CPU: kernels that are compiled ahead, standstills, crews
2   the 8B model as a user runs it, drafts
3   models with experts
4   what has recent figures
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple


class Measurement(NamedTuple):
    """A command of Python (`python …`). `{out}` in it: the folder into which it writes JSON files."""

    name: str
    group: int  # 0: in no group
    seconds: float  # that it is expected to take
    limit: float  # the seconds after which it is stopped
    command: str
    crowd: str = ""  # neighbours with the same name run at once


def _tests(
    name: str, group: int, seconds: float, limit: float, n_workers: int = 4, crowd: str = ""
) -> Measurement:
    """A file of tests. `-vv`: pyproject.toml has `-q`, and each test's outcome should be in the log at once."""
    workers = f" -n {n_workers}" if n_workers else ""
    command = f"-m pytest -vv{workers} --junitxml={{out}}/tests.xml tests/gpu/test_on_gpu_{name}.py"
    return Measurement(name, group, seconds, limit, command, crowd)


def _ready(group: int) -> Measurement:
    return Measurement(f"ready_{group}", group, 15, 60, "-m benchmarks gpu_ready --out {out}/rows.json")


_8B = "--shape llama-8b --weights Q4_K --cache-type q8_0"
_USER = "-m benchmarks user_path --out {out}/rows.json"
_EXPERTS = "-m benchmarks.cuda_experts --out {out}/rows.json"
_BATCH = f"{_EXPERTS} --only batch --requests 8,64"
# Seconds are estimated from benchmarks/results/cuda-notes.md and the JSON files beside it: a file of 8B takes 15 s, one
# of 30B (17 GB) 50, 8 of GLM-4.5-Air's 46 layers (14 GB) 40; loading and compiling 10 to 20 s the first time.
MEASUREMENTS = (
    # 1: a GPU beside a CPU, which was not measured since its kernels are compiled ahead
    _ready(1),
    _tests("compiled_ahead", 1, 90, 180, 3),
    Measurement("standstill_crews", 1, 200, 300, "-m benchmarks standstill --limit 70 --out {out}/rows.json"),
    Measurement("crews", 1, 80, 150, "-m benchmarks cuda_beside --out {out}/rows.json"),
    _tests("beside_cpu", 1, 45, 110, 2),
    _tests("cli", 1, 60, 120, 2),
    # 2: the 8B model as a user runs it
    _ready(2),
    Measurement(
        "user",
        2,
        225,
        320,
        f"{_USER} --limit 110 --only run --only cold --only warm --only defaults --only import",
    ),
    Measurement("long_contexts", 2, 45, 90, f"{_USER} --limit 80 --only cold --n-ctx 45056"),
    Measurement("long", 2, 35, 80, f"{_USER} --limit 70 --only long"),
    Measurement(
        "drafts_deep",
        2,
        75,
        140,
        f"-m benchmarks speculation --device cuda:0 {_8B} --right 0.8 --depth 122880,0 --tokens 512 --rounds 3 "
        "--json {out}/rows.json",
    ),
    _tests("products", 2, 90, 140, 4, "2"),
    _tests("sampling", 2, 60, 140, 3, "2"),
    _tests("drafts", 2, 60, 140, 3, "2"),
    # 3: models with experts
    _ready(3),
    Measurement("experts_file", 3, 50, 150, f"{_EXPERTS} --only write"),
    Measurement("experts_beside_cpu", 3, 75, 150, f"{_EXPERTS} --only beside"),
    Measurement("experts_batch_1", 3, 40, 90, _BATCH),
    Measurement("experts_batch_2", 3, 25, 70, _BATCH),
    Measurement("experts_rows", 3, 60, 120, f"{_EXPERTS} --only decode,prompt,crews,check"),
    Measurement(
        "experts_glm",
        3,
        85,
        150,
        f"{_EXPERTS} --shape glm-4.5-air --layers 8 --depths 0 --requests 8 --only decode,batch,prompt",
    ),
    _tests("memory", 3, 45, 90, 0),
    _tests("expert_models", 3, 90, 150, 3, "3"),
    _tests("experts", 3, 60, 150, 3, "3"),
    _tests("models", 3, 90, 150, 4, "3"),
    _tests("states", 3, 60, 150, 2, "3"),
    _tests("bundles", 3, 40, 150, 2, "3"),
    # 4: what has recent figures
    _ready(4),
    Measurement("standstill", 4, 60, 120, f"{_USER} --only cold"),
    Measurement("kernel_steps", 4, 120, 180, "benchmarks/cuda_model.py --only steps --out {out}/rows.json"),
    Measurement("experts_tiles", 4, 90, 180, f"{_EXPERTS} --only tiles"),
)
GROUPS = (1, 2, 3, 4)


def crowds(measurements: Sequence[Measurement]) -> Iterator[list[Measurement]]:
    """What runs at once: files of tests that need neither all of the GPU's memory nor a CPU device."""
    for crowd, members in groupby(measurements, lambda each: each.crowd):
        own = list(members)
        yield from [own] if crowd else [[each] for each in own]


def expected_seconds(measurements: Sequence[Measurement]) -> float:
    return sum(max(each.seconds for each in crowd) for crowd in crowds(measurements))
