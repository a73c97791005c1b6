"""A whole model with recurrent layers on the GPU's kernels, interpreted, each launch checked, in memory that holds
nothing useful at first: it is loaded, with the batches that a GPU would run then, and answers as the reference does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cuda_models import use_few_programs

from motley import LLM, assembly
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.kernels import delta_net, matvec
from motley.bench import random_model, write_random_model
from motley.bench.shapes import DeltaShape, ExpertShape, Shape
from motley.runtime.warming import KernelWarmer

TINY = Shape(
    *(2, 64, 64, 2, 1, 32, 64),
    n_ctx=256,
    architecture="qwen3next",
    experts=ExpertShape(6, 2, 32, n_ff_shared=32),
    delta=DeltaShape(1, 2, 32, interval=2),
    n_rope=16,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "SHAPES", {"tiny": TINY})
        write_random_model(path, "tiny", "Q8_0")
    return path


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch, undefined_memory: None) -> list[CudaBackend]:
    """LLM takes the GPU's kernels for CPUs, and runs the first batches of a GPU when it loads; its backends."""
    made: list[CudaBackend] = []
    init = KernelWarmer.__init__

    def backend_for_heads(*_: object) -> tuple[CudaBackend, None]:
        made.append(CudaBackend("cpu", captures=False))
        return made[-1], None

    def init_as_for_gpus(self: KernelWarmer, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._is_gpu = True

    monkeypatch.setattr(assembly, "backend_for_heads", backend_for_heads)
    monkeypatch.setattr(CudaBackend, "free_bytes", lambda _: 8 << 30)
    monkeypatch.setattr(KernelWarmer, "__init__", init_as_for_gpus)
    use_few_programs(monkeypatch)
    monkeypatch.setattr(matvec, "tile_for", lambda n: matvec.Tile(256, 2, 1))
    monkeypatch.setattr(delta_net, "_COLUMNS", 32)
    return made


def logits(path: Path, **options: Any) -> torch.Tensor:
    """After a prompt, of a single token, and of several as drafts have them."""
    tokens = [(7 * i * i + 3) % 60 for i in range(40)]
    sizes = {
        "n_ctx": 64,
        "n_parallel": 2,
        "n_batch": 18,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        "spec": "off",
    }
    with LLM(path, **sizes, **options) as llm, llm.raw_sequence() as sequence:
        parts = [tokens[:17], tokens[17:18], tokens[18:21]]
        rows = [torch.as_tensor(sequence.feed(part, n_outputs=1)) for part in parts]
    return torch.cat(rows)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_it_is_loaded_and_answers_in_its_own_memory(
    model: Path, request: pytest.FixtureRequest, devices: str
) -> None:
    expected = logits(model, devices="cpu", backend="reference")
    backends = request.getfixturevalue("on_kernels")
    checks = request.getfixturevalue("checked_launches")
    got = logits(model, devices=devices, **({"split_mode": "tensor"} if "," in devices else {}))
    assert len(backends) == len(devices.split(","))
    assert checks.n_launches > 100
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.1  # int8 activations; a close choice of experts may differ
