"""Random-weight models of known shapes, written quickly: packed rows are made once and repeated.

The values mean nothing, but their bytes are as random as those of real weights, and scales are such that activations
stay of ordinary size: speed is that of a real model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

import gguf
from motley.errors import ConfigError
from motley.formats import Format, get_format

_DISTINCT_ROWS = 64  # rows of a matrix that are packed; the others repeat them


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_ctx: int = 131072

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name, rows, columns) of every matrix."""
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        yield "token_embd", self.n_vocab, self.n_embd
        yield "output", self.n_vocab, self.n_embd
        for i in range(self.n_layers):
            yield f"blk.{i}.attn_q", n_q, self.n_embd
            yield f"blk.{i}.attn_k", n_kv, self.n_embd
            yield f"blk.{i}.attn_v", n_kv, self.n_embd
            yield f"blk.{i}.attn_output", self.n_embd, n_q
            yield f"blk.{i}.ffn_gate", self.n_ff, self.n_embd
            yield f"blk.{i}.ffn_up", self.n_ff, self.n_embd
            yield f"blk.{i}.ffn_down", self.n_embd, self.n_ff


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-15m": Shape(6, 288, 768, 6, 6, 48, 32000),
        "llama-160m": Shape(12, 768, 2048, 12, 12, 64, 32000),
        "llama-1b": Shape(16, 2048, 8192, 32, 8, 64, 32000),
        "llama-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    }
)


def random_model_path(shape_name: str, weights: str) -> Path:
    """Where such a model is kept for the next time: a folder of this user's alone."""
    _shape(shape_name)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "motley" / f"random-{shape_name}-{get_format(weights).name}.gguf"


def write_random_model(path: Path, shape_name: str, weights: str = "Q8_0", seed: int = 1) -> None:
    """Write a GGUF file of a named shape with matrices in the format `weights`. It appears when it is whole."""
    shape, form = _shape(shape_name), get_format(weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder) / path.name
        _write(unfinished, shape, form, f"random {shape_name} {form.name}", seed)
        unfinished.replace(path)


def _shape(name: str) -> Shape:
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}", hint=f"there are: {', '.join(SHAPES)}")
    return SHAPES[name]


def _write(path: Path, shape: Shape, form: Format, name: str, seed: int) -> None:
    """All names and sizes first, then one tensor after the other: a large model does not have to fit into memory."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, shape, name)
    kind = gguf.GGMLQuantizationType[form.name]
    for matrix, rows, columns in shape.matrices():
        size = (rows, form.row_bytes(columns))
        writer.add_tensor_info(f"{matrix}.weight", size, np.dtype(np.uint8), rows * size[1], raw_dtype=kind)
    norms = ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(shape.n_layers) for n in ("attn", "ffn"))]
    ones = np.ones(shape.n_embd, dtype=np.float32)
    for norm in norms:
        writer.add_tensor_info(f"{norm}.weight", ones.shape, ones.dtype, ones.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = torch.Generator().manual_seed(seed)
    for _, rows, columns in shape.matrices():
        distinct = torch.randn(min(rows, _DISTINCT_ROWS), columns, generator=generator) * columns**-0.5
        packed = form.pack(distinct).numpy()
        writer.write_tensor_data(np.resize(packed, (rows, packed.shape[1])))
    for _ in norms:
        writer.write_tensor_data(ones)
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(name)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    tokens = [f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(shape.n_vocab)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * shape.n_vocab)
    writer.add_token_types([6 if i < 256 else 1 for i in range(shape.n_vocab)])  # bytes, ordinary tokens
