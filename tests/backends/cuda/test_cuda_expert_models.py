"""Small models with experts as a whole on the GPU's kernels, under Triton's interpreter; the GPU's own test is
tests/gpu/test_on_gpu_expert_models.py. And the bounds of both: they notice each part that these models alone have.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cuda_models import use_few_programs

sys.path.append(str(Path(__file__).parents[2] / "gpu"))
from expert_models import BOUNDS, MODELS, WINDOW, ExpertModel, check_answers, check_logits, logits_of

from motley import LLM, assembly
from motley.backends.cuda.backend import CudaBackend
from motley.formats import PackedTensor

OPTIONS: dict[str, Any] = {"n_ctx": 64, "n_parallel": 2, "prefix_cache": False}


def reference(path: Path, kind: str = "f16", **options: Any) -> LLM:
    settings = OPTIONS | {"cache_type_k": kind, "cache_type_v": kind} | options
    return LLM(path, devices="cpu", backend="reference", **settings)


def short(model: ExpertModel) -> ExpertModel:
    """One layer with experts, behind the dense ones."""
    return replace(model, n_layers=model.n_dense + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "kind"),
    [(MODELS[0], "cpu", "q8_0"), (MODELS[1], "cpu,cpu", "f16"), (MODELS[2], "cpu", "f16")],
    ids=lambda value: getattr(value, "architecture", value),
)
def test_logits_are_the_references(
    model: ExpertModel, devices: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of many rows, a token after it, and greedy answers of two tokens."""
    path = short(model).write(tmp_path / "model.gguf")
    use_few_programs(monkeypatch)
    crew: dict[str, Any] = {"split_mode": "tensor"} if "," in devices else {}
    with reference(path, kind) as llm:
        expected = {11: logits_of(llm, 11, 1)}
        monkeypatch.setattr(CudaBackend, "free_bytes", lambda self: None)
        monkeypatch.setattr(assembly, "backend_for_heads", lambda *_: (CudaBackend("cpu"), None))
        with LLM(path, devices=devices, cache_type_k=kind, cache_type_v=kind, **OPTIONS, **crew) as ours:
            print(check_logits({11: logits_of(ours, 11, 1)}, expected))
            if devices == "cpu":
                print(check_answers(ours, llm, (3,), 2))


def changes() -> list[Any]:
    """What may be forgotten of each model: names of its tensors, or keys of its metadata with another value."""
    gpt, glm, qwen = MODELS
    return [
        pytest.param(gpt, "attn_sinks.weight", id="sinks"),
        pytest.param(gpt, "attn_v.bias", id="biases of values"),
        pytest.param(gpt, "attn_output.bias", id="biases of the output"),
        pytest.param(gpt, "ffn_gate_inp.bias", id="biases of the router"),
        pytest.param(gpt, "ffn_gate_exps.bias", id="biases of gates"),
        pytest.param(gpt, "ffn_up_exps.bias", id="biases of ups"),
        pytest.param(gpt, "ffn_down_exps.bias", id="biases of downs"),
        pytest.param(gpt, ("attention.sliding_window", 4 * WINDOW), id="window"),
        pytest.param(gpt, ("rope.scaling.factor", 4.0), id="YaRN"),
        pytest.param(glm, "attn_q.bias", id="biases of queries"),
        pytest.param(glm, "exp_probs_b.bias", id="biases of scores"),
        pytest.param(glm, "ffn_down_shexp.weight", id="shared expert"),
        pytest.param(glm, ("expert_group_used_count", 4), id="groups"),
        pytest.param(glm, ("expert_weights_scale", 1.0), id="scale"),
        pytest.param(qwen, "attn_k_norm.weight", id="norms of keys"),
    ]


@pytest.mark.parametrize(("model", "part"), changes())
def test_the_bounds_notice_what_is_forgotten(model: ExpertModel, part: Any, tmp_path: Path) -> None:
    tensors = model.tensors()
    right = model.write(tmp_path / "right.gguf", tensors)
    if isinstance(part, tuple):
        wrong = replace(model, keys=dict(model.keys) | dict([part]))
    else:
        wrong = model
        for name in [name for name in tensors if name.endswith(part)]:
            tensors[name] = without(tensors[name], part)
    other = wrong.write(tmp_path / "wrong.gguf", tensors)
    with reference(right) as llm, reference(other) as changed:
        expected, found = ({n: logits_of(each, n, 6) for n in (48,)} for each in (llm, changed))
    distances = {}
    for kind, bound in (("prompt", BOUNDS.prompt), ("decode", BOUNDS.decode)):
        ours, theirs = getattr(found[48], kind), getattr(expected[48], kind)
        distances[kind] = float(
            np.median(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1))
        )
        assert distances[kind] > 1.5 * bound, distances
    with pytest.raises(AssertionError):
        check_logits(found, expected)


def without(tensor: PackedTensor, part: str) -> PackedTensor:
    """Zeros; norms of ones, and sinks that take nothing from the other scores."""
    value = -1e4 if "sinks" in part else 1.0 if "norm" in part else 0.0
    return PackedTensor.pack(torch.full(tensor.shape, value), tensor.format)
