"""What loading a model must not import: torch._dynamo takes two seconds, and nothing here is compiled by it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

_SCRIPT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.footprint import stored_bytes
from motley.formats import PackedTensor, get_format
from motley.graph.ops import Weight
for kind in ("Q4_K", "Q6_K", "Q5_K", "IQ4_XS", "F16"):
    form = get_format(kind)
    node = Weight((64, 256), kind, "w")(name="w")
    assert stored_bytes(node) > 0
    CudaBackend("cpu").load(PackedTensor.pack(torch.randn(64, 256), form))
import motley.llm
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_loading_weights_imports_no_compiler_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
