"""The models that are trained: GGUF's `llama` (RMSNorm, SwiGLU, grouped queries, RoPE over neighbouring pairs) and
`qwen3moe` (the same with normalised queries and keys, RoPE over halves, and experts).

Training and evaluation share them. They share nothing with the engine in src/, so they can bear witness for it.

The work on one token apart from attention is done by three functions over (tokens, n_embd); their shapes do not depend
on how tokens are cut into sequences, so that a change of the context's length compiles nothing anew.
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
    architecture: str = "llama"  # or "qwen3moe"
    n_vocab: int = 4096
    n_layer: int = 8
    n_embd: int = 384
    n_head: int = 8
    n_head_kv: int = 4
    head_dim: int = 64
    n_ff: int = 896  # of one expert, where there are experts
    n_expert: int = 0
    n_expert_used: int = 0
    n_ctx: int = 4096
    rope_base: float = 50_000.0
    rms_eps: float = 1e-5

    @property
    def n_exit(self) -> int:
        """The number of layers after which an early exit is trained."""
        return self.n_layer // 2


MAIN = Config()
DRAFT = Config(n_layer=4, n_embd=128, n_head=4, n_head_kv=2, n_ff=320)
EXPERTS = Config(
    "qwen3moe",
    n_layer=6,
    n_embd=256,
    n_head=4,
    n_head_kv=2,
    n_ff=96,
    n_expert=16,
    n_expert_used=4,
    rms_eps=1e-6,
)
CONFIGS = {"main": MAIN, "draft": DRAFT, "experts": EXPERTS}
TINY = {
    "main": Config(n_layer=4, n_embd=128, n_head=4, n_head_kv=2, n_ff=256),
    "draft": Config(n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=128),
    "experts": Config("qwen3moe", 4096, 2, 64, 2, 1, 64, 32, 16, 4, rms_eps=1e-6),
}


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Matrix(nn.Module):
    """A weight without a bias, (out, in) or (experts, out, in), named as GGUF names it."""

    def __init__(self, *shape: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) * std)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_table(config: Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (positions, head_dim / 2)."""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    angle = torch.arange(config.n_ctx)[:, None] * config.rope_base ** (-pair / config.head_dim)
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool) -> Tensor:
    """Rotates the pairs of (tokens, heads, head_dim): x[2i] with x[2i + 1], or the two halves with each other."""
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.float().chunk(2, -1) if halves else x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    return torch.cat(rotated, -1) if halves else torch.stack(rotated, -1).flatten(-2)


def heads(x: Tensor, weight: Tensor, head_dim: int) -> Tensor:
    return F.linear(x, weight.to(x.dtype)).unflatten(-1, (-1, head_dim))


def blur(x: Tensor, noise: Tensor) -> Tensor:
    """Noise like that of a 4-bit cache, so that attention learns to do without the last bits."""
    size = x.detach().float().square().mean(-1, keepdim=True).sqrt()
    return x + (noise * size * torch.randn_like(x, dtype=torch.float32)).to(x.dtype)


def before_attention(
    x: Tensor, cos: Tensor, sin: Tensor, noise: Tensor | None, norm: Tensor, q: Tensor, k: Tensor, v: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values, each (tokens, heads, head_dim), rotated."""
    h = rms_norm(x, norm, eps).to(x.dtype)
    queries, keys, values = heads(h, q, head_dim), heads(h, k, head_dim), heads(h, v, head_dim)
    if q_norm is not None and k_norm is not None:
        queries, keys = rms_norm(queries, q_norm, eps), rms_norm(keys, k_norm, eps)
    halves = q_norm is not None
    queries = rope(queries, cos, sin, halves=halves).to(x.dtype)
    keys = rope(keys, cos, sin, halves=halves).to(x.dtype)
    if noise is not None:
        keys, values = blur(keys, noise), blur(values, noise)
    return queries, keys, values


def dense_ffn(
    x: Tensor,
    attended: Tensor,
    output: Tensor,
    norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    eps: float,
) -> Tensor:
    """The residual stream after attention's output and a SwiGLU."""
    x = x + F.linear(attended, output.to(x.dtype))
    h = rms_norm(x, norm, eps).to(x.dtype)
    inner = F.silu(F.linear(h, gate.to(x.dtype))) * F.linear(h, up.to(x.dtype))
    return x + F.linear(inner, down.to(x.dtype))


def expert_ffn(
    x: Tensor, attended: Tensor, output: Tensor, norm: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    n_used: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same with a mixture of experts, and how unevenly they are used (1: evenly).

    All experts compute, and those not chosen count nothing: with experts this small that is faster than sorting.
    """
    x = x + F.linear(attended, output.to(x.dtype))
    normed = rms_norm(x, norm, eps)
    chances = F.linear(normed, router).softmax(-1)  # (tokens, experts), float32
    chosen = torch.zeros_like(chances).scatter(-1, chances.topk(n_used, -1).indices, 1.0)
    weights = chances * chosen
    weights = weights / weights.sum(-1, keepdim=True)
    n_expert, n_ff, _ = gate.shape
    h = normed.to(x.dtype)
    inner = F.silu(F.linear(h, gate.flatten(0, 1).to(x.dtype))) * F.linear(h, up.flatten(0, 1).to(x.dtype))
    inner = (inner.unflatten(-1, (n_expert, n_ff)) * weights[..., None].to(x.dtype)).flatten(-2)
    x = x + F.linear(inner, down.transpose(0, 1).flatten(1).to(x.dtype))
    unevenness = n_expert / n_used * (chosen.mean(0) * chances.mean(0)).sum()
    return x, unevenness


STEPS: dict[str, Callable[..., object]] = {
    "before_attention": before_attention,
    "dense_ffn": dense_ffn,
    "expert_ffn": expert_ffn,
}
COMPILED: dict[str, Callable[..., object]] = {}


def compile_steps() -> None:
    COMPILED.update({name: torch.compile(step, dynamic=False) for name, step in STEPS.items()})


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        branch_end = 0.02 / (2 * c.n_layer) ** 0.5  # so that depth does not make the residual stream grow
        self.attn_norm = RMSNorm(c.n_embd, c.rms_eps)
        self.attn_q = Matrix(c.n_head * c.head_dim, c.n_embd)
        self.attn_k = Matrix(c.n_head_kv * c.head_dim, c.n_embd)
        self.attn_v = Matrix(c.n_head_kv * c.head_dim, c.n_embd)
        self.attn_output = Matrix(c.n_embd, c.n_head * c.head_dim, std=branch_end)
        self.ffn_norm = RMSNorm(c.n_embd, c.rms_eps)
        if c.n_expert:
            self.attn_q_norm = RMSNorm(c.head_dim, c.rms_eps)
            self.attn_k_norm = RMSNorm(c.head_dim, c.rms_eps)
            self.ffn_gate_inp = Matrix(c.n_expert, c.n_embd)
            self.ffn_gate_exps = Matrix(c.n_expert, c.n_ff, c.n_embd)
            self.ffn_up_exps = Matrix(c.n_expert, c.n_ff, c.n_embd)
            self.ffn_down_exps = Matrix(c.n_expert, c.n_embd, c.n_ff, std=branch_end)
        else:
            self.ffn_gate = Matrix(c.n_ff, c.n_embd)
            self.ffn_up = Matrix(c.n_ff, c.n_embd)
            self.ffn_down = Matrix(c.n_embd, c.n_ff, std=branch_end)

    def forward(
        self, x: Tensor, shape: tuple[int, int], cos: Tensor, sin: Tensor, noise: Tensor | None,
        kv_filter: KVFilter | None, steps: dict[str, Callable[..., object]],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        c = self.config
        norms = (self.attn_q_norm.weight, self.attn_k_norm.weight) if c.n_expert else (None, None)
        q, k, v = steps["before_attention"](
            x, cos, sin, noise, self.attn_norm.weight, self.attn_q.weight, self.attn_k.weight, self.attn_v.weight,
            *norms, c.rms_eps, c.head_dim,
        )  # fmt: skip
        q, k, v = (
            each.unflatten(0, shape).transpose(1, 2) for each in (q, k, v)
        )  # (batch, heads, length, head_dim)
        if kv_filter is not None:
            k, v = kv_filter(k, v)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).flatten(0, 1).flatten(-2)
        common = (x, attended, self.attn_output.weight, self.ffn_norm.weight)
        if not c.n_expert:
            y = steps["dense_ffn"](
                *common, self.ffn_gate.weight, self.ffn_up.weight, self.ffn_down.weight, c.rms_eps
            )
            return y, None
        return steps["expert_ffn"](
            *common, self.ffn_gate_inp.weight, self.ffn_gate_exps.weight, self.ffn_up_exps.weight,
            self.ffn_down_exps.weight, c.n_expert_used, c.rms_eps,
        )  # fmt: skip


class Model(nn.Module):
    """`kv_filter` sees keys (after RoPE) and values as a KV cache would, to quantize them."""

    def __init__(self, config: Config, kv_filter: KVFilter | None = None) -> None:
        super().__init__()
        self.config, self.kv_filter = config, kv_filter
        self.token_embd = Matrix(config.n_vocab, config.n_embd)  # also the output matrix
        self.blk = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.output_norm = RMSNorm(config.n_embd, config.rms_eps)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(
        self,
        ids: Tensor,
        *,
        noise: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, length) -> the last layer's and the exit's output, (tokens, n_embd), normalised; and unevenness."""
        steps = COMPILED if compiled else STEPS
        n, length = ids.shape
        cos, sin = self.cos[:length].repeat(n, 1), self.sin[:length].repeat(n, 1)
        x = F.embedding(ids.flatten(), self.token_embd.weight).to(dtype)
        early, uneven = x, torch.zeros((), device=x.device)
        for i, block in enumerate(self.blk):
            x, more = block(x, (n, length), cos, sin, noise, self.kv_filter, steps)
            if more is not None:
                uneven = uneven + more / self.config.n_layer
            if i + 1 == self.config.n_exit:
                early = x
        return self.output_norm(x), self.output_norm(early), uneven

    def forward(self, ids: Tensor, *, exits_early: bool = False) -> Tensor:
        """(batch, length) -> logits (batch, length, n_vocab)."""
        last, early, _ = self.hidden(ids)
        return F.linear(early if exits_early else last, self.token_embd.weight).unflatten(0, ids.shape)
