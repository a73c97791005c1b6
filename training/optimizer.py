"""Muon for the matrices of the layers, AdamW for embedding and norms.

Muon (K. Jordan, 2024): momentum, then the nearest orthogonal matrix of it as the update, found by five steps of a
Newton-Schulz iteration. Matrices of one shape are updated together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from training.model import Model

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(stack: Tensor) -> Tensor:
    """(n, rows, columns) -> about the nearest orthogonal matrices, singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    x = stack.bfloat16() if stack.is_cuda else stack.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Muon:
    def __init__(self, weights: list[Tensor], *, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        """Weights are (rows, columns), or (experts, rows, columns)."""
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for weight in weights:
            groups[tuple(weight.shape)].append(weight)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros((len(g), *g[0].shape), device=g[0].device) for g in self.groups]
        self.momentum, self.weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([weight.grad for weight in group])  # type: ignore[arg-type]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalized(grads.lerp(buffer, self.momentum).flatten(0, -3)).view_as(buffer)
            rows, columns = buffer.shape[-2:]
            scale = rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-scale)

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for buffer, saved in zip(self.buffers, state["buffers"], strict=True):
            buffer.copy_(saved)


class Optimizer:
    """Both, with one learning rate: a factor of 1 means the peak."""

    def __init__(self, model: Model, *, muon_rate: float, adam_rate: float, weight_decay: float) -> None:
        named = dict(model.named_parameters())
        is_matrix = {
            name: weight.dim() >= 2 and name != "token_embd.weight" and "ffn_gate_inp" not in name
            for name, weight in named.items()
        }
        self.muon = Muon([w for name, w in named.items() if is_matrix[name]], weight_decay=weight_decay)
        rest = [w for name, w in named.items() if not is_matrix[name]]
        self.adam = torch.optim.AdamW(
            rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda
        )
        self.muon_rate, self.adam_rate = muon_rate, adam_rate

    def step(self, factor: float) -> None:
        self.muon.step(self.muon_rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
