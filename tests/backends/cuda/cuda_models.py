"""Small llamas without a file, and what runs them under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motley.backends.cuda.kernels import attention, bundles, matvec
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.gguf.metadata import Metadata
from motley.gguf.tensors import TensorInfo
from motley.kvcache.arena import GroupBatch, SequenceTable

EMBD, DIM, FF, VOCAB, SIZE = 128, 64, 256, 40, 16


def make_spec(
    matrices: str, *, n_layers: int = 1, n_heads: int = 2, n_kv_heads: int = 1
) -> tuple[ModelSpec, dict[str, PackedTensor]]:
    shapes = {
        "token_embd.weight": (VOCAB, EMBD),
        "output_norm.weight": (EMBD,),
        "output.weight": (VOCAB, EMBD),
    }
    for i in range(n_layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (EMBD,),
            f"blk.{i}.ffn_norm.weight": (EMBD,),
            f"blk.{i}.attn_q.weight": (n_heads * DIM, EMBD),
            f"blk.{i}.attn_k.weight": (n_kv_heads * DIM, EMBD),
            f"blk.{i}.attn_v.weight": (n_kv_heads * DIM, EMBD),
            f"blk.{i}.attn_output.weight": (EMBD, n_heads * DIM),
            f"blk.{i}.ffn_gate.weight": (FF, EMBD),
            f"blk.{i}.ffn_up.weight": (FF, EMBD),
            f"blk.{i}.ffn_down.weight": (EMBD, FF),
        }
    numbers: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": n_layers,
        "llama.embedding_length": EMBD,
        "llama.attention.head_count": n_heads,
        "llama.attention.head_count_kv": n_kv_heads,
        "llama.attention.key_length": DIM,
        "llama.attention.value_length": DIM,
        "llama.feed_forward_length": FF,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: PackedTensor.pack(
            torch.rand(shape, generator=generator) + 0.5
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * shape[-1] ** -0.5,
            get_format("F32" if len(shape) == 1 else matrices),
        )
        for name, shape in shapes.items()
    }
    infos = {
        name: TensorInfo(name, weight.shape, weight.format.name, weight.nbytes, 0, 0)
        for name, weight in weights.items()
    }
    return ModelSpec(Path("small"), Metadata(numbers, Path("small")), infos, ()), weights


def make_batch(n_contexts: list[int], n_new: list[int]) -> GroupBatch:
    """Sequences with `n_contexts` tokens in the cache, the last `n_new` of which are the batch's."""
    tables, row = [], 0
    for number, (n, new) in enumerate(zip(n_contexts, n_new, strict=True)):
        blocks = np.arange(-(-n // SIZE), dtype=np.int32) + 2 * (len(n_contexts) - 1 - number)
        tables.append(SequenceTable(row, new, n - new, 0, blocks))
        row += new
    return GroupBatch.of(tables, SIZE)


def inputs_of(batch: GroupBatch, output_rows: list[int]) -> dict[str, torch.Tensor]:
    n_tokens = len(batch.slots)
    positions = [torch.arange(t.position, t.position + t.n_rows) for t in batch.tables]
    return {
        "tokens": torch.arange(n_tokens, dtype=torch.int32) + 3,
        "positions": torch.cat(positions).int(),
        "output_rows": torch.tensor(output_rows, dtype=torch.int32),
    }


def use_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program takes its time, however small: few, large ones."""
    monkeypatch.setattr(matvec, "tile_for", lambda n_columns: matvec.Tile(256, n_columns // 32, 1))
    monkeypatch.setattr(attention, "TUNINGS", dict.fromkeys(attention.TUNINGS, attention.Tuning(4)))
    monkeypatch.setattr(bundles, "TUNINGS", (bundles.Tuning(64, 4),))
