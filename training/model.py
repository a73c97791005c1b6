"""A Llama as GGUF's `llama` means it: RMSNorm, SwiGLU, grouped queries, RoPE over neighbouring pairs.

Training and evaluation share it. It shares nothing with the engine in src/, so it can bear witness for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KVFilter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Config:
    n_vocab: int = 4096
    n_layer: int = 6
    n_embd: int = 384
    n_head: int = 8
    n_head_kv: int = 4
    head_dim: int = 64
    n_ff: int = 768
    n_ctx: int = 4096
    rope_base: float = 50_000.0
    rms_eps: float = 1e-5
    dropout: float = 0.0  # of what attention and FFN add to the residual stream, and of the embedding


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_table(config: Config, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (positions, head_dim / 2)."""
    pair = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float64)
    angle = torch.arange(config.n_ctx, device=device)[:, None] * config.rope_base ** (-pair / config.head_dim)
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[2i], x[2i + 1]) of (batch, heads, tokens, head_dim)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: Config, kv_filter: KVFilter | None) -> None:
        super().__init__()
        c = self.config = config
        self.kv_filter = kv_filter
        self.attn_norm = RMSNorm(c.n_embd, c.rms_eps)
        self.attn_q = nn.Linear(c.n_embd, c.n_head * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.ffn_norm = RMSNorm(c.n_embd, c.rms_eps)
        self.ffn_gate = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_up = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_down = nn.Linear(c.n_ff, c.n_embd, bias=False)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (
            y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)  # (batch, heads, tokens, head_dim)
            for y in (self.attn_q(h), self.attn_k(h), self.attn_v(h))
        )
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        if self.kv_filter is not None:
            k, v = self.kv_filter(k, v)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.attn_output(attended.transpose(1, 2).flatten(-2)))
        h = self.ffn_norm(x)
        return x + self.dropout(self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)))


class Llama(nn.Module):
    """`kv_filter` sees keys (after RoPE) and values as a KV cache would: to add noise, or to quantize."""

    def __init__(self, config: Config, kv_filter: KVFilter | None = None) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.n_vocab, config.n_embd)  # also the output matrix
        self.blk = nn.ModuleList(Block(config, kv_filter) for _ in range(config.n_layer))
        self.output_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.dropout = nn.Dropout(config.dropout)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # What writes into the residual stream starts smaller, so that depth does not make it grow.
                is_branch_end = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.n_layer) ** 0.5 if is_branch_end else 0.02)

    def hidden(self, ids: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, tokens, n_embd), normalised."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.dropout(self.token_embd(ids))
        for block in self.blk:
            x = block(x, cos, sin)
        return self.output_norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) -> logits (batch, tokens, n_vocab)."""
        return F.linear(self.hidden(ids), self.token_embd.weight)
