"""`motley run -ngl N` on a real GPU, with the bundled model: each number of layers, in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import motley
from motley.gguf import read_spec
from motley.models import read_params

MODEL = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"
N_LAYERS = read_params(read_spec(MODEL)).n_layers
HALF = N_LAYERS // 2


@dataclass
class Outcome:
    tokens: list[int]
    messages: str

    @property
    def shares(self) -> dict[str, float]:
        """Each device's percentage of the weights; empty if there is only one device."""
        found = re.search("^weights: (.*)", self.messages, re.MULTILINE)
        return {} if found is None else {n: float(p) for n, p in re.findall(r"(\S+) ([\d.]+)%", found[1])}


def run(*flags: str) -> Outcome:
    words = ["run", str(MODEL), "-p", "Tell me a story about a fox.", "-n", "16", "--temp", "0", "-c", "512"]
    result = subprocess.run(
        [sys.executable, "-m", "motley", *words, "--json", "-v", *flags],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return Outcome(json.loads(result.stdout)["tokens"], result.stderr)


def test_half_of_the_layers_are_on_the_gpu_and_half_on_the_cpu() -> None:
    outcome = run("-ngl", str(HALF))
    assert set(outcome.shares) == {"cpu", "cuda:0"}
    assert outcome.shares["cpu"] > 25
    assert outcome.shares["cuda:0"] > 25
    proportions = f"{N_LAYERS - HALF},{HALF}"
    same = run("--device", "cpu,cuda:0", "-sm", "layer", "-ts", proportions)
    assert same.shares == outcome.shares
    assert same.tokens == outcome.tokens


def test_more_layers_on_the_gpu_are_more_weights_there() -> None:
    few, many = (run("-ngl", str(n)).shares["cuda:0"] for n in (1, N_LAYERS - 1))
    assert few < many


@pytest.mark.parametrize("layers", ["99", "all", str(N_LAYERS)])
def test_all_layers_are_on_the_gpu(layers: str) -> None:
    outcome = run("-ngl", layers, "-mg", "0")
    assert outcome.shares == {}
    assert "cpu: " not in outcome.messages  # a line for each CPU of the crew
    assert "no effect" not in outcome.messages
    assert outcome.tokens == run("--device", "cuda:0").tokens


def test_no_layer_is_on_the_gpu() -> None:
    outcome = run("-ngl", "0")
    assert outcome.shares == {}
    assert "cuda" not in outcome.messages  # "cpu: " is in it where the native kernels are installed
    assert outcome.tokens == run("--device", "cpu").tokens
