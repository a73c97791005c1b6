"""Loads a model over two devices within a limit of memory, in a process of its own.

    python loading_probe.py MODEL BYTES [greedy]

BYTES is what may be allocated beside what the process has after its imports: the kernel refuses more, so that peaks
count that no sampling would see. The file's map does not count.
`greedy`: as if each weight were copied before it is cut.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from motley.backends import get_backend
from motley.formats import PackedTensor
from motley.gguf import read_spec
from motley.models import BatchShape, GraphOptions, read_params
from motley.ownership import State
from motley.runtime import ModelSplit, loading, make_crew


def allocated() -> int:
    """Bytes of private writable memory, which is what RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def copy_first(
    weight: PackedTensor, state: State, device: int, rows: tuple[tuple[int, int], ...] = ()
) -> PackedTensor:
    return PART_OF(PackedTensor(weight.data.clone(), weight.format), state, device, rows)


def in_turn(work: Callable[[int], None]) -> None:
    for device in range(2):
        work(device)


PART_OF = loading.part_of


def main(path: str, limit: str, *how: str) -> None:
    if "greedy" in how:
        loading.part_of = copy_first
    spec = read_spec(path)
    split = ModelSplit(spec, read_params(spec), make_crew("cpu,cpu", "tensor", "2,1"), GraphOptions(64))
    shares = [split.share(device, BatchShape(1, 1)) for device in range(2)]
    backend = get_backend("reference")
    torch.set_num_threads(1)  # other threads' stacks would count
    before = allocated()
    resource.setrlimit(resource.RLIMIT_DATA, (before + int(limit), resource.RLIM_INFINITY))
    weights = loading.load_weights(spec, shares, [backend, backend], in_turn)
    parts = {
        id(part): part.nbytes
        for device in weights
        for name, part in device.items()
        if name != "token_embd.weight"
    }
    print(sum(parts.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
