"""Small GGUF files with random weights, for tests that need a model and no meaning: sizes that they can count on.

`LLAMA` has two KV heads of 64 dims; `NARROW` has heads of 24, which no rotation fits and which do not fill a tile;
`GEMMA3` has windows of 32 tokens in five of its six layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import quantize

from gguf import GGMLQuantizationType, GGUFWriter

N_VOCAB = 320
N_EMBD = 256
N_FF = 256
_PLAIN_TOKEN, _CONTROL_TOKEN = 1, 3  # GGUF's token types
_MERGES = ["t h", "th e", "Ġ a", "o n", "i n", "Ġ the"]


@dataclass(frozen=True)
class RandomModel:
    """The sizes of a model; `keys` are metadata without the architecture's prefix."""

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    keys: dict[str, Any]
    head_dim: int = 64

    def write(self, path: Path, seed: int = 0, *, is_q8_0: bool = False, has_tokenizer: bool = True) -> Path:
        """The model as a file: the same bytes for the same seed. Matrices are F16, or Q8_0."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in (self._sizes() | self.keys).items():
            _add(writer, f"{self.architecture}.{key}", value)
        if has_tokenizer:
            _add_vocabulary(writer)
        else:
            writer.add_tokenizer_model("no_vocab")
            writer.add_vocab_size(N_VOCAB)
        rng = np.random.default_rng(seed)
        for name, shape in self._shapes().items():
            if len(shape) == 1:
                weight = 1 + 0.1 * rng.standard_normal(shape)
            else:
                # Large enough for attention to prefer some tokens, so that a mix-up of the cache shows.
                weight = 1.5 * rng.standard_normal(shape) / np.sqrt(shape[-1])
            if is_q8_0 and len(shape) > 1:
                kind = GGMLQuantizationType.Q8_0
                writer.add_tensor(name, quantize(weight.astype(np.float32), kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, weight.astype(np.float32 if len(shape) == 1 else np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _sizes(self) -> dict[str, Any]:
        return {
            "context_length": 2048,
            "embedding_length": N_EMBD,
            "block_count": self.n_layers,
            "feed_forward_length": N_FF,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Each tensor by name; matrices are (outputs, inputs)."""
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (N_EMBD,),
            "attn_q": (self.n_heads * self.head_dim, N_EMBD),
            "attn_k": (self.n_kv_heads * self.head_dim, N_EMBD),
            "attn_v": (self.n_kv_heads * self.head_dim, N_EMBD),
            "attn_output": (N_EMBD, self.n_heads * self.head_dim),
            "ffn_norm": (N_EMBD,),
            "ffn_gate": (N_FF, N_EMBD),
            "ffn_up": (N_FF, N_EMBD),
            "ffn_down": (N_EMBD, N_FF),
        }
        if self.architecture == "gemma3":
            layer |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
            layer |= {"post_attention_norm": (N_EMBD,), "post_ffw_norm": (N_EMBD,)}
        outer = {"token_embd.weight": (N_VOCAB, N_EMBD), "output_norm.weight": (N_EMBD,)}
        return outer | {
            f"blk.{number}.{name}.weight": shape
            for number in range(self.n_layers)
            for name, shape in layer.items()
        }


LLAMA = RandomModel("llama", 4, 8, 2, {"rope.freq_base": 500_000.0})
NARROW = RandomModel("llama", 2, 4, 2, {}, head_dim=24)
GEMMA3 = RandomModel("gemma3", 6, 4, 2, {"rope.freq_base": 1e6, "attention.sliding_window": 32})


def _add(writer: GGUFWriter, key: str, value: float) -> None:
    if isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _add_vocabulary(writer: GGUFWriter) -> None:
    """Byte-level BPE: all bytes, a few merges, and control tokens up to `N_VOCAB`; the last one ends a text."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    n_others = 256 - len(printable)
    plain = [*map(chr, printable), *(chr(256 + i) for i in range(n_others))]
    plain += [merge.replace(" ", "") for merge in _MERGES]
    control = [f"<|control {i}|>" for i in range(N_VOCAB - len(plain))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(plain + control)
    writer.add_token_types([_PLAIN_TOKEN] * len(plain) + [_CONTROL_TOKEN] * len(control))
    writer.add_token_merges(_MERGES)
    writer.add_eos_token_id(N_VOCAB - 1)
    writer.add_add_bos_token(False)
