"""A worker for `peers`: HF transformers on the CPU, with random weights of the same shape."""

from __future__ import annotations

from typing import Any

import torch
from peer_worker import serve
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


class Transformers:
    def __init__(self, config: dict[str, Any], n_threads: int, dtype: str) -> None:
        torch.set_num_threads(n_threads)
        torch.set_default_dtype(getattr(torch, dtype))
        self._model = LlamaForCausalLM(LlamaConfig(**config)).eval()
        self._cache = DynamicCache()
        self.about = f"torch {torch.__version__}"

    def begin(self, depth: int) -> None:
        self._cache = DynamicCache()
        config = self._model.config
        for layer in range(config.num_hidden_layers if depth else 0):
            keys, values = torch.randn(2, 1, config.num_key_value_heads, depth, config.head_dim)
            self._cache.update(keys, values, layer)

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> None:
        self._model(torch.tensor([tokens]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)


if __name__ == "__main__":
    serve(Transformers)
