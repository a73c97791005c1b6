"""Tiny random transformers models: every architecture in the variants that change its graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

N_VOCAB = 260
_CONTEXT = 128
_SIZES: Mapping[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _CONTEXT,
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,
    "eos_token_id": N_VOCAB - 1,
}
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3vlmoe": "qwen3_vl_moe_text",
}  # where transformers has another name than GGUF


@dataclass(frozen=True)
class TinyModel:
    """An architecture with options of its transformers configuration, and how long a text to try it on."""

    name: str
    architecture: str
    options: Mapping[str, Any] = field(default_factory=dict)
    n_ctx: int = _CONTEXT
    n_tokens: int = 72  # beyond every original context that a scaling mentions

    @property
    def has_own_rope(self) -> bool:
        return "rope_parameters" in self.options

    def build(self, **overrides: Any) -> PreTrainedModel:
        """The same weights at every call, whatever rope options are overridden."""
        options = deepcopy({**_SIZES, **self.options, **overrides})  # configurations write into theirs
        model_type = _MODEL_TYPES.get(self.architecture, self.architecture)
        config = AutoConfig.for_model(model_type, **options)
        model_class: Any = _VisionText if self.architecture == "qwen3vlmoe" else AutoModelForCausalLM
        model: PreTrainedModel = model_class.from_config(config, attn_implementation="eager").eval()
        _randomize(model)
        return model


class _VisionText(torch.nn.Module):
    """The text part of a model that sees, with an output matrix: what AutoModelForCausalLM makes of other ones."""

    @classmethod
    def from_config(cls, config: Any, attn_implementation: str) -> _VisionText:
        config._attn_implementation = attn_implementation
        return cls(config)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3VLMoeTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.model(input_ids=tokens).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))


def hf_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """float32 (tokens, vocab)"""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def random_tokens(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(N_VOCAB, (n,), generator=generator).tolist()


def _randomize(model: PreTrainedModel) -> None:
    """Weights of a size at which attention prefers some tokens, so that a wrong angle moves the logits."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2 and not name.endswith("bias"):
            parameter.data = 1.5 * noise / math.sqrt(parameter.shape[-1])
        elif "norm" in name:
            parameter.data = 1 + 0.3 * noise
        else:
            parameter.data = 0.5 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


def _longrope(n_dims: int, **options: Any) -> dict[str, Any]:
    factors = {
        "short_factor": [1 + 0.05 * i for i in range(n_dims // 2)],
        "long_factor": [1 + 0.5 * i for i in range(n_dims // 2)],
    }
    # Phi 3's configuration has the original context beside the rope's parameters, not among them.
    return {"original_max_position_embeddings": 64, **_rope("longrope", factor=2.0, **factors, **options)}


_MHA = {"num_key_value_heads": 4}
_MQA = {"num_key_value_heads": 1}
_TIED = {"tie_word_embeddings": True}
_LINEAR = _rope("linear", factor=4.0)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
_TUNED_YARN = {
    "max_position_embeddings": 512,
    **_rope(
        "yarn",
        factor=8.0,
        original_max_position_embeddings=64,
        attention_factor=0.8,
        beta_fast=2.0,
        beta_slow=0.1,
    ),
}
_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

_GEMMA3_SIZES = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}

_QWEN_EXPERTS = {
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_QWEN_DELTA = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **_rope("default", partial_rotary_factor=0.5),
}
_QWEN_NEXT = _QWEN_EXPERTS | _QWEN_DELTA | {"shared_expert_intermediate_size": 48}
_QWEN_NEXT_EVERY_OTHER = _QWEN_NEXT | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 2,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
}
_GLM = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "attention_bias": True,
    "first_k_dense_replace": 1,
}
_GLM_GROUPED = _GLM | {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "num_key_value_heads": 1,
}
_GPT_OSS = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
    **_rope(
        "yarn",
        factor=8.0,
        original_max_position_embeddings=64,
        beta_fast=2.0,
        beta_slow=0.1,
        truncate=False,
    ),
}

GEMMA3 = TinyModel("gemma3", "gemma3", _GEMMA3_SIZES | {"num_hidden_layers": 6})
GLM4MOE = TinyModel("glm4moe", "glm4moe", _GLM)
GPT_OSS = TinyModel("gpt-oss", "gpt-oss", _GPT_OSS)
# The 27B model is known by its 62 layers: its scores are scaled by width / heads (here 24), not by the head's 16 dims.
GEMMA3_27B = TinyModel(
    "gemma3, 62 layers",
    "gemma3",
    _GEMMA3_SIZES | {"num_hidden_layers": 62, "hidden_size": 96, "query_pre_attn_scalar": 24},
)
SOFT_CAPPED = TinyModel(
    "gemma3, soft-capped logits",
    "gemma3",
    _GEMMA3_SIZES | {"sliding_window_pattern": 2, "final_logit_softcapping": 3.0},
)
LLAMA = TinyModel("llama", "llama")
LINEAR = TinyModel("llama, linear", "llama", _LINEAR)
LONGROPE = TinyModel("phi3, longrope", "phi3", _longrope(16))
QWEN3MOE = TinyModel("qwen3moe", "qwen3moe", _QWEN_EXPERTS)
QWEN3VLMOE = TinyModel(
    "qwen3vlmoe",
    "qwen3vlmoe",
    _QWEN_EXPERTS | _rope("default", mrope_section=[6, 5, 5], mrope_interleaved=True),
)
QWEN35MOE = TinyModel("qwen35moe", "qwen35moe", _QWEN_NEXT | _TIED)
GLM_GROUPED = TinyModel(
    "glm4moe, groups of experts, two shared, scaled, qk norm, MQA", "glm4moe", _GLM_GROUPED
)
QWEN3NEXT = TinyModel("qwen3next", "qwen3next", _QWEN_NEXT)

TINY_MODELS = [
    GEMMA3,
    TinyModel(
        "gemma3, untied, linear, every third layer global",
        "gemma3",
        _GEMMA3_SIZES
        | {"tie_word_embeddings": False, "num_hidden_layers": 4}
        | {"sliding_window_pattern": 3, "rope_parameters": _GEMMA3_ROPE},
    ),
    GLM4MOE,
    GLM_GROUPED,
    TinyModel("glm4moe, weights not normalized", "glm4moe", _GLM | {"norm_topk_prob": False}),
    GPT_OSS,
    TinyModel("gpt-oss, MQA", "gpt-oss", _GPT_OSS | _MQA),
    SOFT_CAPPED,
    LLAMA,
    TinyModel("llama, MHA, tied", "llama", _MHA | _TIED),
    TinyModel("llama, MQA, wide heads", "llama", _MQA | {"head_dim": 48}),
    TinyModel("llama, biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    LINEAR,
    TinyModel("llama, yarn", "llama", _YARN),
    TinyModel("llama, tuned yarn", "llama", _TUNED_YARN),
    TinyModel("llama, llama3", "llama", _LLAMA3),
    TinyModel("qwen2", "qwen2"),
    TinyModel("qwen2, MHA, tied, heads of 24", "qwen2", _MHA | _TIED | {"hidden_size": 96}),
    TinyModel("qwen2, MQA, yarn", "qwen2", _MQA | _YARN),
    TinyModel("qwen2, linear", "qwen2", _LINEAR),
    TinyModel("qwen3, wide heads", "qwen3", {"head_dim": 32}),
    TinyModel("qwen3, MHA, tied, biases", "qwen3", _MHA | _TIED | {"head_dim": 16, "attention_bias": True}),
    TinyModel("qwen3, MQA, tuned yarn", "qwen3", _MQA | _TUNED_YARN | {"head_dim": 24}),
    QWEN3MOE,
    TinyModel(
        "qwen3moe, MHA, tied, weights not normalized",
        "qwen3moe",
        _QWEN_EXPERTS | _MHA | _TIED | {"num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    TinyModel("qwen3moe, one expert, yarn", "qwen3moe", _QWEN_EXPERTS | _YARN | {"num_experts_per_tok": 1}),
    QWEN3NEXT,
    TinyModel("qwen35", "qwen35", _QWEN_DELTA | {"linear_num_value_heads": 6}),
    QWEN35MOE,
    TinyModel("qwen3next, every other layer, MQA, tied", "qwen3next", _QWEN_NEXT_EVERY_OTHER | _MQA | _TIED),
    QWEN3VLMOE,
    TinyModel("phi3", "phi3"),
    TinyModel("phi3, MHA, tied", "phi3", _MHA | _TIED),
    TinyModel("phi3, MQA, wide heads", "phi3", _MQA | {"head_dim": 32}),
    TinyModel("phi3, window", "phi3", {"sliding_window": 20}),
    TinyModel("phi3, part of each head", "phi3", _rope("default", partial_rotary_factor=0.5)),
    TinyModel("phi3, longrope, short context", "phi3", LONGROPE.options, n_ctx=64, n_tokens=64),
    LONGROPE,
    TinyModel("phi3, longrope, part of each head", "phi3", _longrope(8, partial_rotary_factor=0.5)),
]
