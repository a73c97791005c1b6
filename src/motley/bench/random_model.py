"""Writes models of known shapes with random weights. To be fast, it packs a few rows and repeats them.

The bytes are as random as those of real weights, and the scales keep activations at an ordinary size, so the speed is
that of a real model. The rows of routers are not repeated, so that tokens choose experts at random.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

import gguf
from motley.bench.shapes import SHAPES, RandomTensor, Shape
from motley.caches import cache_folder
from motley.errors import ConfigError
from motley.formats import Format, get_format

_DISTINCT_ROWS = 64  # rows of a matrix that are packed; the others repeat them
_PIECE_BYTES = 4 << 20  # that are written at a time


def random_model_path(shape_name: str, weights: str, n_layers: int | None = None) -> Path:
    """The path where such a model is kept for reuse, in the user's cache folder."""
    _shape(shape_name, n_layers)
    part = "" if n_layers is None else f"-{n_layers}-layers"
    return cache_folder() / f"random-{shape_name}{part}-{get_format(weights).name}.gguf"


def write_random_model(
    path: Path,
    shape_name: str,
    weights: str = "Q8_0",
    seed: int = 1,
    n_layers: int | None = None,
    finer: str | None = None,
) -> None:
    """Writes a GGUF file of a named shape with matrices in the format `weights`. The file appears when it is complete.

    `n_layers`: write only the first `n_layers` layers. `finer`: the format of the output and of every fourth layer's
    ffn_down and attn_v, as in files named *_M.
    """
    shape, form = _shape(shape_name, n_layers), get_format(weights)
    shape = replace(shape, finer=finer or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder) / path.name
        tensors = _with_finer(shape.tensors(form), None if finer is None else get_format(finer))
        _write(unfinished, shape, tensors, f"random {shape_name} {form.name}", seed)
        unfinished.replace(path)


def _shape(name: str, n_layers: int | None) -> Shape:
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}", hint=f"there are: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    if n_layers is None:
        return shape
    if not 1 <= n_layers <= shape.n_layers:
        raise ConfigError(
            f"{name} has {shape.n_layers} layers, not {n_layers}",
            hint=f"--layers must be from 1 to {shape.n_layers}",
        )
    return replace(shape, n_layers=n_layers)


def _write(path: Path, shape: Shape, tensors: Sequence[RandomTensor], name: str, seed: int) -> None:
    """Writes the header with all names and sizes, then the tensors: the model need not fit into memory."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    _write_metadata(writer, shape, name)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.format.name]
        size = (*tensor.shape[:-1], tensor.format.row_bytes(tensor.shape[-1]))
        writer.add_tensor_info(tensor.name, size, np.dtype(np.uint8), prod(size), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    _fill(path, tensors, seed)


def _fill(path: Path, tensors: Sequence[RandomTensor], seed: int) -> None:
    """Writes the data of all tensors behind the header, on all cores."""
    sizes = [prod(t.shape[:-1]) * t.format.row_bytes(t.shape[-1]) for t in tensors]
    starts, stop = [], _aligned(path.stat().st_size)
    for size in sizes:
        starts.append(stop)
        stop = _aligned(stop + size)
    with path.open("r+b") as file:
        file.truncate(stop)
    rows = _DistinctRows(seed)

    def fill(number: int) -> None:
        tensor, start, size = tensors[number], starts[number], sizes[number]
        with path.open("r+b") as file:
            file.seek(start)
            for piece in _pieces(rows.of(tensor, number), size):
                file.write(piece)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(len(tensors))))


def _aligned(n: int) -> int:
    return -(-n // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT


def _pieces(rows: npt.NDArray[np.uint8], n_bytes: int) -> Iterator[bytes]:
    """The rows again and again, up to `n_bytes`."""
    times = min(-(-_PIECE_BYTES // rows.nbytes), -(-n_bytes // rows.nbytes))
    whole = np.tile(rows, (times, 1)).tobytes()
    for start in range(0, n_bytes, len(whole)):
        yield whole if n_bytes - start >= len(whole) else whole[: n_bytes - start]


class _DistinctRows:
    """The packed rows that a tensor repeats. Rows of matrices of one format and width are packed once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._packed: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
        self._lock = Lock()

    def of(self, tensor: RandomTensor, number: int) -> npt.NDArray[np.uint8]:
        n_rows, n_columns = prod(tensor.shape[:-1]), tensor.shape[-1]
        if tensor.fill is not None:
            return tensor.format.pack(torch.full((n_rows, n_columns), tensor.fill)).numpy()
        if tensor.format.block_size == 1:
            return self._random(tensor.format, n_rows, n_columns, number)
        key = tensor.format.name, n_columns
        with self._lock:
            if key not in self._packed:
                self._packed[key] = self._random(tensor.format, _DISTINCT_ROWS, n_columns, len(self._packed))
        return np.roll(self._packed[key], number, 0)

    def _random(self, form: Format, n_rows: int, n_columns: int, number: int) -> npt.NDArray[np.uint8]:
        # Not torch's generator: it needs parts of torch that a command does not import (lean_torch).
        rng = np.random.default_rng((self._seed, number))
        values = rng.standard_normal((n_rows, n_columns), np.float32) * np.float32(n_columns**-0.5)
        return form.pack(torch.from_numpy(values)).numpy()


def _with_finer(tensors: Iterable[RandomTensor], finer: Format | None) -> list[RandomTensor]:
    if finer is None:
        return list(tensors)

    def is_finer(name: str) -> bool:
        parts = name.split(".")
        return name == "output.weight" or (parts[-2] in ("ffn_down", "attn_v") and int(parts[1]) % 4 == 0)

    return [replace(each, format=finer) if is_finer(each.name) else each for each in tensors]


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
    n_rope = shape.head_dim // 2 if shape.architecture == "glm4moe" else shape.head_dim
    writer.add_rope_dimension_count(shape.n_rope or n_rope)
    writer.add_vocab_size(shape.n_vocab)
    if shape.architecture == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if shape.delta is not None:
        delta, arch = shape.delta, shape.architecture
        writer.add_ssm_conv_kernel(delta.n_taps)
        writer.add_ssm_state_size(delta.head_dim)
        writer.add_ssm_group_count(delta.n_keys)
        writer.add_ssm_time_step_rank(delta.n_values)
        writer.add_ssm_inner_size(delta.n_values * delta.head_dim)
        writer.add_uint32(f"{arch}.full_attention_interval", delta.interval)
    if shape.experts is not None:
        _write_expert_metadata(writer, shape)
    tokens = [f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(shape.n_vocab)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * shape.n_vocab)
    writer.add_token_types([6 if i < 256 else 1 for i in range(shape.n_vocab)])  # types: byte, normal


def _write_expert_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    experts = shape.experts
    assert experts is not None
    writer.add_expert_count(experts.n_experts)
    writer.add_expert_used_count(experts.n_used)
    writer.add_expert_feed_forward_length(experts.n_ff)
    if experts.n_ff_shared and shape.delta is not None:
        writer.add_expert_shared_feed_forward_length(experts.n_ff_shared)
    elif experts.n_ff_shared:
        writer.add_expert_shared_count(experts.n_ff_shared // experts.n_ff)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if experts.n_dense_layers:
        writer.add_leading_dense_block_count(experts.n_dense_layers)
