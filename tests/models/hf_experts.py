"""What hf_to_gguf has to know of models with experts: their sizes, and where transformers keeps the matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from motley.formats import PackedTensor

Scalar = int | float | str | bool
Weight = torch.Tensor | PackedTensor

EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def expert_sizes(config: Any) -> dict[str, Scalar]:
    """Metadata without the architecture's prefix; none for a dense model. Defaults are left out, as converters do."""
    n_experts = next((getattr(config, key, 0) for key in _COUNTS if getattr(config, key, 0)), 0)
    if not n_experts:
        return {}
    sizes: dict[str, Scalar] = {"expert_count": n_experts, "expert_used_count": config.num_experts_per_tok}
    sizes["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if config.model_type == "qwen3_moe" and not config.norm_topk_prob:
        sizes["expert_weights_norm"] = False
    if config.model_type == "glm4_moe":
        sizes |= {
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_gating_func": 2,
        }
    return sizes


_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def expert_tensors(name: str, weight: torch.Tensor, is_gpt_oss: bool) -> Mapping[str, Weight]:
    """model.layers.1.mlp.experts.gate_up_proj → blk.1.ffn_gate_exps.weight and blk.1.ffn_up_exps.weight"""
    index, part = name.removeprefix("model.layers.").split(".mlp.experts.")
    kind = "bias" if part.endswith("_bias") else "weight"
    if is_gpt_oss and kind == "weight":
        weight = weight.transpose(1, 2)  # there they are (experts, in, out)
    label = f"blk.{index}.ffn_{{}}_exps.{kind}".format
    if part.startswith("down_proj"):
        return {label("down"): weight.contiguous()}
    if is_gpt_oss:  # rows of gate and up take turns
        gate, up = weight[:, ::2], weight[:, 1::2]
    else:
        gate, up = weight.chunk(2, dim=1)
    return {label("gate"): gate.contiguous(), label("up"): up.contiguous()}
