"""What a process that compiles ahead makes of a kernel's constants. A process of its own: needs TRITON_INTERPRET=0.

Prints the kinds of the constants of `_convert` to int8 rows, after they went through a job.
"""

from __future__ import annotations

import json

import compile_kernels
import torch
from triton import knobs
from triton.runtime import driver

from motley.backends.cuda.compile_worker import keep_strings
from motley.backends.cuda.compiling import Job, recording
from motley.backends.cuda.kernels import rows

driver.set_active(compile_kernels.NoGpu(90))
jobs: dict[Job, None] = {}
with recording(jobs):
    rows.convert(torch.zeros(1, 64), rows.Rows.empty(rows.INT8, 1, 64, "cpu"))
(job,) = jobs
keep_strings()
seen = {}


def note(*, compile: dict[str, object], **_: object) -> bool:  # noqa: A002  Triton's name
    seen.update(compile)
    return True  # compile nothing


knobs.runtime.jit_cache_hook = note
getattr(rows, job.name).preload(job.data)
print(json.dumps(sorted({type(value).__name__ for value in seen["constants"].values()})))
