"""What hf_to_gguf has to know of gated delta nets: sizes, and how transformers mixes the rows of their matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Scalar = int | float | str | bool

DELTA_NAMES = {
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
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def delta_tensors(name: str, weight: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor] | None:
    """The tensors that one parameter of a delta net becomes; None: it is named like others."""
    if ".linear_attn." not in name:
        return None
    index, part = name.removeprefix("model.layers.").split(".linear_attn.")
    label = f"blk.{index}.{{}}".format
    match part:
        case "conv1d.weight":
            return {label("ssm_conv1d.weight"): weight.squeeze(1)}
        case "dt_bias":
            return {label("ssm_dt.bias"): weight}
        case "A_log":
            return {label("ssm_a"): -weight.exp()}
        case "in_proj_qkvz.weight":
            return {label(f"{kind}.weight"): rows for kind, rows in _qkv_and_z(weight, config).items()}
    return None


def _qkv_and_z(weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """There the rows are, for each key head: query, key, its values, their gates."""
    n_keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    n_each = config.linear_num_value_heads // n_keys * config.linear_value_head_dim
    q, k, v, z = weight.view(n_keys, -1, weight.shape[1]).split([dim, dim, n_each, n_each], dim=1)
    q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in (q, k, v, z))
    return {"attn_qkv": torch.cat([q, k, v]), "attn_gate": z}
