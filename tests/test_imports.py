"""What is imported, and when: torch takes more than a second, its compiler as long again."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Never needed to run a model on a CPU: torch's compiler and what it brings, and what the tests install.
HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "pandas", "rich")

GENERATE = """
from motley import LLM
from motley.bundled import bundled_model_path
with LLM(bundled_model_path(), n_ctx=64) as llm:
    llm.generate(["Once", "The sea"], max_tokens=3, temperature=0.8, top_p=0.9, seed=1)
    llm.generate("Once", max_tokens=2, temperature=0)
"""


def imported(code: str) -> set[str]:
    """Names of the modules that a process has imported after `code`."""
    script = f"{code}\nimport sys\nprint(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split("\n"))


def test_the_package_alone_imports_next_to_nothing() -> None:
    modules = imported("import motley")
    assert {name for name in modules if name.startswith("motley")} == {"motley", "motley.errors"}
    assert not modules & {"torch", "numpy", "typer", *HEAVY}


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_does_not_wait_for_torch(flag: str) -> None:
    call = f"from motley.cli.commands import run\nimport sys\nsys.argv = ['motley', {flag!r}]\nrun()"
    modules = imported(call)
    assert "typer" in modules
    assert not modules & {"torch", "numpy"}


def test_generating_imports_no_compiler() -> None:
    assert not imported(GENERATE) & set(HEAVY)
