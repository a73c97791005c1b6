"""What hf_to_gguf has to know of gated delta nets: sizes, and how transformers mixes the rows of their matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Scalar = int | float | str | bool

DELTA_NAMES = {
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


def delta_sizes(config: Any) -> dict[str, Scalar]:
    """Metadata without the architecture's prefix; none for a model without delta nets."""
    if not hasattr(config, "linear_num_key_heads"):
        return {}
    sizes: dict[str, Scalar] = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
    }
    if hasattr(config, "shared_expert_intermediate_size"):
        sizes["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return sizes


def delta_tensors(name: str, weight: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor] | None:
    """The tensors that one parameter of a delta net becomes; None: it is named like others."""
    if ".linear_attn." not in name:
        return None
    index, part = name.removeprefix("model.layers.").split(".linear_attn.")
    label = f"blk.{index}.{{}}".format
    if config.model_type.startswith("qwen3_5"):
        weight = _in_cyclic_order(part, weight, config)
    match part:
        case "in_proj_qkv.weight":
            return {label("attn_qkv.weight"): weight}
        case "in_proj_z.weight":
            return {label("attn_gate.weight"): weight}
        case "in_proj_a.weight" | "in_proj_b.weight" | "out_proj.weight":
            name = {"a": "ssm_alpha", "b": "ssm_beta"}.get(part.removeprefix("in_proj_")[0], "ssm_out")
            return {label(f"{name}.weight"): weight}
        case "conv1d.weight":
            return {label("ssm_conv1d.weight"): weight.squeeze(1)}
        case "dt_bias":
            return {label("ssm_dt.bias"): weight}
        case "A_log":
            return {label("ssm_a"): -weight.exp()}
        case "in_proj_qkvz.weight":
            return {label(f"{kind}.weight"): rows for kind, rows in _qkv_and_z(weight, config).items()}
    return None


def _in_cyclic_order(part: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Value heads of one key head are neighbours there. In a GGUF file of Qwen 3.5 the first values of all key heads
    come first, then the second ones, and so on.
    """
    n_keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    n_each = config.linear_num_value_heads // n_keys

    def reordered(rows: torch.Tensor, width: int) -> torch.Tensor:
        heads = rows.reshape(n_keys, n_each, width, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)

    n_before = 2 * n_keys * config.linear_key_head_dim
    match part:
        case "in_proj_qkv.weight" | "conv1d.weight":
            return torch.cat([weight[:n_before], reordered(weight[n_before:], dim)])
        case "in_proj_z.weight":
            return reordered(weight, dim)
        case "out_proj.weight":
            return reordered(weight.T, dim).T.contiguous()
        case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
            return reordered(weight, 1)
    return weight


def _qkv_and_z(weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """There the rows are, for each key head: query, key, its values, their gates."""
    n_keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    n_each = config.linear_num_value_heads // n_keys * config.linear_value_head_dim
    q, k, v, z = weight.view(n_keys, -1, weight.shape[1]).split([dim, dim, n_each, n_each], dim=1)
    q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in (q, k, v, z))
    return {"attn_qkv": torch.cat([q, k, v]), "attn_gate": z}
