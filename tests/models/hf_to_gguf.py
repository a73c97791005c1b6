"""A transformers model as a complete GGUF file.

It shares nothing with the engine but the packing of weights, so that a misunderstanding on either side shows
as a difference in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hf_delta import DELTA_NAMES, delta_sizes, delta_tensors
from hf_experts import EXPERT_NAMES, expert_sizes, expert_tensors
from transformers import PreTrainedModel

from gguf import GGMLQuantizationType, GGUFWriter
from motley.formats import PackedTensor, get_format

Scalar = int | float | str | bool

_OUTER_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **EXPERT_NAMES,
    **DELTA_NAMES,
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_POST_NORM_LAYER_NAMES = _LAYER_NAMES | {"post_attention_layernorm": "post_attention_norm"}
_NAMES = {
    "gemma3": _GEMMA_LAYER_NAMES,
    "glm4moe": _POST_NORM_LAYER_NAMES,
    "gpt-oss": _POST_NORM_LAYER_NAMES,
    "qwen3next": _POST_NORM_LAYER_NAMES,
    "qwen35": _POST_NORM_LAYER_NAMES,
    "qwen35moe": _POST_NORM_LAYER_NAMES,
}
_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
}  # where GGUF has another name than transformers
_GEMMA_PERIOD = 6  # layers from one global layer to the next, where the file does not say
_PLAIN_TOKEN, _CONTROL_TOKEN = 1, 3  # GGUF's token types


@dataclass(frozen=True)
class GGUFContent:
    """What a GGUF file says. The mappings may be edited before it is written."""

    architecture: str
    metadata: dict[str, Scalar | list[str] | list[int]]
    tensors: dict[str, torch.Tensor | PackedTensor]

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            _add_value(writer, key, value)
        for name, tensor in self.tensors.items():
            if isinstance(tensor, PackedTensor):
                kind = GGMLQuantizationType[tensor.format.name]
                writer.add_tensor(name, tensor.data.numpy(), raw_dtype=kind)
            else:
                writer.add_tensor(name, tensor.numpy().astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def pack_matrices(model: PreTrainedModel, format_name: str) -> dict[str, PackedTensor]:
    """Pack every matrix of `model`, by name, and leave the values there that the packed ones stand for."""
    packed = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            packed[name] = PackedTensor.pack(parameter.data, get_format(format_name))
            parameter.data = packed[name].unpack()
    return packed


def to_gguf(model: PreTrainedModel, packed: Mapping[str, PackedTensor] | None = None) -> GGUFContent:
    """The content of the model's file: weights as F32, but for those that come `packed`."""
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    rope_metadata, rope_tensors = _rope(model)
    tensors: dict[str, torch.Tensor | PackedTensor] = dict(rope_tensors)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensors[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = buffer
    for name, parameter in model.named_parameters():
        weight = (packed or {}).get(name, parameter.detach())
        if ".experts." in name:
            parts = expert_tensors(name, parameter.detach(), is_gpt_oss=architecture == "gpt-oss")
            tensors |= {n: _packed_alike(w, weight) for n, w in parts.items()}
            continue
        own = delta_tensors(name, parameter.detach(), config)
        if own is not None:
            tensors |= {n: _packed_alike(w, weight) for n, w in own.items()}
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = _interleaved(weight, _head_dim(config))
        elif _adds_one(architecture, name):
            weight = parameter.detach() + 1  # transformers adds it when it runs
        tensors[_gguf_name(name, architecture)] = weight
    keys = _sizes(config) | expert_sizes(config) | delta_sizes(config) | rope_metadata
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    return GGUFContent(architecture, metadata | _vocabulary(config.vocab_size), tensors)


def _adds_one(architecture: str, name: str) -> bool:
    """Whether it is the weight of a norm to which transformers adds 1."""
    is_norm = "norm" in name and "linear_attn" not in name
    return is_norm and architecture in ("gemma3", "qwen3next", "qwen35", "qwen35moe")


def _packed_alike(weight: torch.Tensor, example: torch.Tensor | PackedTensor) -> torch.Tensor | PackedTensor:
    return PackedTensor.pack(weight, example.format) if isinstance(example, PackedTensor) else weight


def _add_value(writer: GGUFWriter, key: str, value: Scalar | list[str] | list[int]) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _gguf_name(name: str, architecture: str) -> str:
    """model.layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight"""
    stem, kind = name.removeprefix("model.").rsplit(".", 1)
    if not stem.startswith("layers."):
        return f"{_OUTER_NAMES[stem]}.{kind}"
    _, index, part = stem.split(".", 2)
    if kind == "sinks":
        return f"blk.{index}.attn_sinks.weight"
    names = _NAMES.get(architecture, _LAYER_NAMES)
    return f"blk.{index}.{names[part]}.{kind}"


def _interleaved(weight: torch.Tensor | PackedTensor, head_dim: int) -> torch.Tensor | PackedTensor:
    """Reorder each head's rows so that those that rotate together are neighbours: 0, n/2, 1, n/2 + 1, …"""
    if isinstance(weight, PackedTensor):
        return PackedTensor(_interleave_rows(weight.data, head_dim), weight.format)
    return _interleave_rows(weight, head_dim)


def _interleave_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])  # (heads, half, pair, ...)
    return halves.transpose(1, 2).reshape(rows.shape)


def _head_dim(config: Any) -> int:
    head_dim: int | None = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def _sizes(config: Any) -> dict[str, Scalar]:
    """Keys that have a default are left out where it holds, as real converters do."""
    sizes: dict[str, Scalar] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if config.num_key_value_heads != config.num_attention_heads:
        sizes["attention.head_count_kv"] = config.num_key_value_heads
    head_dim = _head_dim(config)
    if head_dim * config.num_attention_heads != config.hidden_size:
        sizes |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if getattr(config, "sliding_window", None):
        sizes["attention.sliding_window"] = config.sliding_window
    if getattr(config, "final_logit_softcapping", None):
        sizes["final_logit_softcapping"] = config.final_logit_softcapping
    if config.model_type == "gemma3_text":
        period = config.layer_types.index("full_attention") + 1
        if period != _GEMMA_PERIOD:
            sizes["attention.sliding_window_pattern"] = period
    return sizes


def _rope(model: PreTrainedModel) -> tuple[dict[str, Scalar], dict[str, torch.Tensor]]:
    """Metadata (without the architecture's prefix) and tensors of the rotary positions."""
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    n_dims = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    metadata: dict[str, Scalar] = {"rope.freq_base": float(rope["rope_theta"])}
    if n_dims != _head_dim(config):
        metadata["rope.dimension_count"] = n_dims
    if "sliding_attention" in config.rope_parameters:
        metadata["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    tensors: dict[str, torch.Tensor] = {}
    embedding = model.model.rotary_emb
    match rope["rope_type"]:
        case "linear" | "yarn" as kind:
            metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
            if kind == "yarn":
                metadata |= _yarn(rope, embedding.attention_scaling)
        case "llama3":  # has no metadata: the file says what each frequency is divided by
            plain = rope["rope_theta"] ** -(torch.arange(0, n_dims, 2) / n_dims)
            tensors["rope_freqs.weight"] = plain / embedding.inv_freq
        case "longrope":
            metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
            metadata["rope.scaling.attn_factor"] = float(embedding.attention_scaling)
            for length in ("short", "long"):
                tensors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"])
    return metadata, tensors


def _yarn(rope: Mapping[str, Any], magnitude: float) -> dict[str, Scalar]:
    """GGUF's attn_factor comes on top of 1 + ln(factor) / 10, transformers' attention factor replaces it."""
    metadata: dict[str, Scalar] = {
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    usual = 1 + math.log(rope["factor"]) / 10
    if magnitude != usual:
        metadata["rope.scaling.attn_factor"] = magnitude / usual
    for beta in ("beta_fast", "beta_slow"):
        if rope.get(beta):
            metadata[f"rope.scaling.yarn_{beta}"] = float(rope[beta])
    return metadata


def _vocabulary(n_tokens: int) -> dict[str, Scalar | list[str] | list[int]]:
    """GPT-2's: all bytes, one merge, and control tokens up to `n_tokens`; the last one ends a text."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    plain = [*characters, "th"]
    control = [f"<|control {i}|>" for i in range(n_tokens - len(plain))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": plain + control,
        "tokenizer.ggml.token_type": [_PLAIN_TOKEN] * len(plain) + [_CONTROL_TOKEN] * len(control),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": n_tokens - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
