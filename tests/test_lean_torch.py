"""`import torch` in Motley's own processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from motley import lean_torch

DEFER = "from motley.lean_torch import defer; defer(); import torch\n"
SAY = "import sys; print('torch._decomp.decompositions' in sys.modules)\n"


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_nobody_uses_is_not_imported() -> None:
    assert torch.__version__.startswith(lean_torch._TRIED), "try it with this version, then name it in _TRIED"
    assert run(DEFER + "print(torch.ones(2).sum().item())\n" + SAY) == "2.0\nFalse"
    assert run(DEFER + SAY, MOTLEY_WHOLE_TORCH="1") == "True"


@pytest.mark.slow
def test_it_comes_when_something_asks_for_it() -> None:
    code = "import torch._meta_registrations as shapes; print(callable(shapes.meta_mm)); import inspect\n"
    assert run(DEFER + code + SAY) == "True\nTrue"
    code = "from torch._meta_registrations import meta_mm; print(callable(meta_mm))\n"
    assert run(DEFER + code + SAY) == "True\nTrue"


@pytest.mark.slow
def test_modules_within_a_deferred_one_are_found() -> None:
    code = """
import torch.utils.data.distributed
from torch.optim import SGD
print(SGD.__name__, torch.distributions.Normal.__name__, torch.utils.data.distributed.DistributedSampler.__name__)
"""
    assert run(DEFER + code + SAY) == "SGD Normal DistributedSampler\nTrue"


def test_a_module_that_is_not_installed_is_not_deferred() -> None:
    code = "from motley import lean_torch; lean_torch._UNUSED.add('torch.not_there')\n" + DEFER
    code += """
try:
    import torch.not_there
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(code) == "torch.not_there"


@pytest.mark.slow
def test_the_compiler_finds_all_of_torch() -> None:
    code = """
class Double(torch.nn.Module):
    def forward(self, x):
        return x @ x

program = torch.export.export(Double(), (torch.ones(3, 3),))
print(program.module()(torch.ones(3, 3)).sum().item())
"""
    assert run(DEFER + code + SAY) == "27.0\nTrue"


def test_another_version_of_torch_is_imported_whole() -> None:
    assert run("from motley import lean_torch; lean_torch._TRIED = ('0.',)\n" + DEFER + SAY) == "True"


def test_a_program_that_has_torch_already_is_left_alone() -> None:
    code = "import sys, torch; before = list(sys.meta_path)\n" + DEFER + "print(sys.meta_path == before)"
    assert run(code) == "True"
