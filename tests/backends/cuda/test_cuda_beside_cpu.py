"""A GPU's programs (under Triton's interpreter) beside native programs of the CPU: the same answers as one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

from cuda_models import use_few_programs

from motley import LLM, assembly
from motley.backends import BACKENDS, Backend, is_available
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.borrowing import Borrowing
from motley.bundled import bundled_experts_path
from motley.models import BatchShape
from motley.runtime import lending
from motley.runtime.batches_ahead import BatchesAhead
from random_models import RandomModel

pytestmark = pytest.mark.skipif(not is_available(), reason="the native module is not built")

TOKENS = [5, 91, 230]
SETTINGS: dict[str, Any] = {"n_ctx": 32, "n_parallel": 1, "cache_type_k": "f32", "cache_type_v": "f32"}
DENSE: list[dict[str, Any]] = [
    {"split_mode": "layer", "tensor_split": (3, 1)},
    {"split_mode": "tensor", "tensor_split": (1, 1)},
]
EXPERTS: list[dict[str, Any]] = [{"n_cpu_moe": 9}, {"n_cpu_moe": 9, "expert_split": (1, 1)}]


def open_crew(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """The first device has the GPU's backend, the second one the CPU's."""
    use_few_programs(monkeypatch)
    made: Iterator[Backend] = iter([CudaBackend("cpu"), BACKENDS["cpu-exact"]()])
    monkeypatch.setattr(assembly, "backend_for_heads", lambda *_: (next(made), None))
    return LLM(path, devices="cpu,cpu", **SETTINGS, **options)


def alone(path: Path) -> npt.NDArray[np.float32]:
    with LLM(path, devices="cpu", backend="reference", **SETTINGS) as llm:
        return llm.logits(TOKENS)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, npt.NDArray[np.float32]]:
    """A model, and its logits on one device."""
    model = RandomModel("llama", 2, 4, 2, {"rope.freq_base": 500_000.0})
    path = model.write(tmp_path_factory.mktemp("models") / "llama.gguf")
    return path, alone(path)


def assert_close(logits: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    np.testing.assert_allclose(logits, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("options", DENSE, ids=lambda o: o["split_mode"])
def test_logits_of_a_dense_model_are_those_of_one_device(
    dense: tuple[Path, npt.NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    path, expected = dense
    with open_crew(path, monkeypatch, **options) as llm:
        assert_close(llm.logits(TOKENS), expected)


def test_rows_from_which_weights_are_copied_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RandomModel("llama", 2, 4, 2, {"rope.freq_base": 500_000.0}).write(
        tmp_path / "llama.gguf", is_q8_0=True
    )
    measured: list[int] = []

    def measure(*_: Any) -> int:
        measured.append(48)
        return 48

    monkeypatch.delenv("MOTLEY_BORROW_ROWS", raising=False)
    monkeypatch.setattr(lending, "measured_rows", measure)
    with open_crew(path, monkeypatch, split_mode="layer", tensor_split=(1, 1)) as llm:
        assert measured == [48]
        assert llm._loaded.split.min_lent_rows == 48


def test_first_batches_change_no_answer_and_a_failed_recording_refuses_no_model(
    on_a_gpu: None, dense: tuple[Path, npt.NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = dense
    ran: list[int] = []
    run = BatchesAhead._run_stored

    def watched(self: BatchesAhead, shape: BatchShape, longest: int) -> torch.Tensor | None:
        logits = run(self, shape, longest)
        assert logits is not None
        ran.append(shape.n_tokens)
        return logits

    monkeypatch.setattr(BatchesAhead, "_run_stored", watched)
    with open_crew(path, monkeypatch, split_mode="layer", tensor_split=(3, 1)) as llm:
        assert ran == [1, 1]
        assert not llm.warm_up.kernels  # the interpreter would launch kernels: these are not recorded
        (notice,) = llm.warm_up.notices
        assert "ahead of their first use (peers would wait)" in notice
        assert llm._loaded.engine.scheduler.max_rows is None
        assert_close(llm.logits(TOKENS), expected)


@pytest.mark.slow
def test_the_benchmark_of_a_cpus_part_of_a_prompt_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    from benchmarks.cuda_overlap import cpu_beside_copies

    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "32")
    with open_crew(bundled_experts_path(), monkeypatch, n_cpu_moe=9) as llm:
        rows = cpu_beside_copies(llm, 40)
    assert list(rows) == ["4 rows", "8 rows", "40 rows"]
    assert all(row["alone_ms"] > 0 for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("options", EXPERTS, ids=["apart", "shared"])
def test_logits_of_experts_apart_are_those_of_one_device(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    expected = alone(bundled_experts_path())
    with open_crew(bundled_experts_path(), monkeypatch, **options) as llm:
        assert_close(llm.logits(TOKENS), expected)


@pytest.mark.slow
def test_prompts_are_multiplied_by_copies_of_the_weights_of_the_cpus_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RandomModel("llama", 3, 4, 2, {"rope.freq_base": 500_000.0})
    path = model.write(tmp_path / "llama.gguf", is_q8_0=True)
    expected = alone(path)
    copied = watch_copies(monkeypatch)
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "3")
    with open_crew(path, monkeypatch, split_mode="layer", tensor_split=(1, 2)) as llm:
        assert_close(llm.logits(TOKENS), expected)
        assert len(copied) == 2 * 7  # all matrices of two layers
        copied.clear()
        assert_close(llm.logits(TOKENS[:2]), expected[:2])
        assert not copied
        # The keys and values of a prompt are where later tokens look for them.
        after_prompt = llm.generate(TOKENS, max_tokens=2, temperature=0.0).tokens
        assert copied
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "0")
    with open_crew(path, monkeypatch, split_mode="layer", tensor_split=(1, 2)) as llm:
        assert after_prompt == llm.generate(TOKENS, max_tokens=2, temperature=0.0).tokens


def watch_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of weights that are copied from now on."""
    copied: list[str] = []
    bring = Borrowing._bring

    def watched(self: Borrowing, names: tuple[str, ...]) -> None:
        is_there = self._held[self._set_of[names]] == names
        bring(self, names)
        if not is_there:
            copied.extend(names)

    monkeypatch.setattr(Borrowing, "_bring", watched)
    return copied


class ExpertModel(RandomModel):
    """Two layers of four experts, of which each token uses two."""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super()._shapes()
        for layer in range(self.n_layers):
            prefix = f"blk.{layer}."
            for name in ("gate", "up", "down"):
                shapes[f"{prefix}ffn_{name}_exps.weight"] = (4, *shapes.pop(f"{prefix}ffn_{name}.weight"))
            shapes[f"{prefix}ffn_gate_inp.weight"] = (4, 256)
            shapes |= {f"{prefix}attn_{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return shapes


EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, npt.NDArray[np.float32]]:
    model = ExpertModel("qwen3moe", 3, 4, 2, EXPERT_KEYS)
    path = model.write(tmp_path_factory.mktemp("models") / "experts.gguf", is_q8_0=True)
    return path, alone(path)


@pytest.mark.slow
def test_few_rows_use_the_experts_of_the_cpu_and_many_rows_copies_of_them(
    experts: tuple[Path, npt.NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = experts
    copied = watch_copies(monkeypatch)
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "3")
    with open_crew(path, monkeypatch, n_cpu_moe=3) as llm:
        many = llm.logits(TOKENS)
        assert set(copied) == {
            f"blk.{layer}.ffn_{name}_exps.weight" for layer in range(3) for name in ("gate", "up", "down")
        }
        copied.clear()
        few = llm.logits(TOKENS[:2])
        assert not copied
    assert_close(few, expected[:2])
    with open_crew(path, monkeypatch, split_mode="layer", tensor_split=(1, 0)) as llm:
        np.testing.assert_array_equal(many, llm.logits(TOKENS))  # as if the first device had all experts


@pytest.mark.slow
def test_prompts_are_multiplied_by_copies_of_layers_with_experts_and_norms_of_heads(
    experts: tuple[Path, npt.NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = experts
    copied = watch_copies(monkeypatch)
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "3")
    with open_crew(path, monkeypatch, split_mode="layer", tensor_split=(2, 1)) as llm:
        assert_close(llm.logits(TOKENS), expected)
    assert len(copied) == 7  # the router is loaded
