"""Layers with a recurrent state: a causal convolution and the gated delta rule.

Both read the state of each sequence of the batch, run its rows in order, and store the state again. A state may be
some tokens behind the batch: the inputs of these *pending* tokens are stored beside it and are applied first. In the
same way the last rows of a batch may stay pending, so that they can still be rejected (see graph.values.StateSequence).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from motley.graph.ops.sources import Input
from motley.graph.tensor import RECURRENT, Op, Shape, Tensor, Way
from motley.graph.values import StateLayer, dense
from motley.ownership import Split, State, Word

CONVOLUTION, DELTA = "conv", "delta"  # parts of a layer's state


@dataclass(frozen=True)
class StateInput(Input):
    """One part of a layer's recurrent state. The convolution's: (taps - 1, channels), its latest inputs, oldest first.
    The delta rule's: (value heads, key dim, value dim).
    """

    layer: int
    part: str

    @staticmethod
    def of(layer: int, part: str, shape: Shape) -> Tensor:
        return StateInput(shape, RECURRENT, layer, part)(name=StateInput.name_of(layer, part))

    @staticmethod
    def name_of(layer: int, part: str) -> str:
        """The input's name. Placements use it as their key."""
        return f"state.{layer}.{part}"

    @property
    def pending_shape(self) -> Shape:
        """The shape of the stored inputs of one pending token. Its first axis is split like the state."""
        if self.part == CONVOLUTION:
            return self.size[1:]
        n_heads, key_dim, value_dim = self.size
        return n_heads, key_dim + value_dim + 2


def state_of(tensor: Tensor) -> StateInput:
    assert isinstance(tensor.op, StateInput), f"{tensor!r} is no recurrent state"
    return tensor.op


@dataclass(frozen=True)
class CausalConv(Op):
    """silu(Σ over taps t of weight[c, t] · x[p - taps + 1 + t, c]) for each channel c of each row, at position p.

    x (tokens, channels), weight (channels, taps), the convolution's state (taps - 1, channels) → (tokens, channels).
    Rows before a sequence's beginning are zeros. A pending token's stored input is its row of x.
    """

    name: ClassVar[str] = "causal_conv"
    n_inputs: ClassVar[tuple[int, int]] = (3, 3)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        x, weight, state = inputs
        self.require(len(x.shape) == 2 and len(weight.shape) == 2, "needs (tokens, channels)", x, weight)
        channels, taps = weight.shape
        self.require(state.dtype == RECURRENT, "the third input is no recurrent state", state)
        fits = x.shape[1] == channels and state.shape == (taps - 1, channels)
        self.require(fits, "channels or taps differ", *inputs)
        return x.shape

    def reference(self, inputs: Sequence[Any]) -> torch.Tensor:
        x, weight = inputs[0], dense(inputs[1])
        layer: StateLayer = inputs[2]
        taps = weight.shape[1]
        out = torch.zeros_like(x)
        for sequence in layer.sequences():
            window, pending = sequence.read()
            own = x[sequence.rows]
            before = len(pending)
            line = torch.cat([window, pending, own])  # from taps - 1 rows before the first pending token on
            taken = line.unfold(0, taps, 1)[before:]  # (rows, channels, taps)
            out[sequence.rows] = F.silu((taken * weight).sum(-1))
            folded = before + sequence.n_folded
            sequence.write(line[folded : folded + taps - 1], own[sequence.n_folded :])
        return out

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        """Split by channels, which are independent."""
        for state, axis in zip(states, (1, 0, 1), strict=True):
            if isinstance(state, Split) and state.axis == axis:
                word = state.word
                yield Way((Split(1, word), Split(0, word), Split(1, word)), Split(1, word))


@dataclass(frozen=True)
class DeltaNet(Op):
    """The gated delta rule. For each value head, with its matrix S, row after row of a sequence:

        S ← exp(decay) · S;  S ← S + k · (beta · (v - Sᵀ·k))ᵀ;  out = Sᵀ·q / sqrt(key dim)

    mixed (tokens, q | k | v) holds queries and keys of all key heads, then values of all value heads; q and k are
    divided by sqrt(Σ of squares + eps). decay and beta (tokens, value heads), the state (value heads, key dim, value
    dim) → (tokens, value heads, value dim). Value head j uses key head j // (value heads / key heads), or, if
    `is_cyclic`, j mod key heads. A pending token's stored inputs, for each value head: k, v, decay, beta.
    """

    name: ClassVar[str] = "delta_net"
    n_inputs: ClassVar[tuple[int, int]] = (4, 4)
    tolerance: ClassVar[float] = 1e-4
    eps: float = 1e-6
    is_cyclic: bool = False

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        mixed, decay, beta, state = inputs
        self.require(state.dtype == RECURRENT, "the fourth input is no recurrent state", state)
        n_tokens, n_heads = mixed.shape[0], state.shape[0]
        fits = decay.shape == beta.shape == (n_tokens, n_heads)
        self.require(fits, "needs one decay and one beta for each value head", *inputs)
        n_keys = n_key_heads(mixed.shape[1], state.shape)
        grouped = n_heads % n_keys == 0 if n_keys else n_heads == 0
        self.require(grouped and n_keys >= 0, "value heads are no multiple of key heads", mixed, state)
        return n_tokens, n_heads, state.shape[2]

    def reference(self, inputs: Sequence[Any]) -> torch.Tensor:
        mixed: torch.Tensor = inputs[0]
        decay, beta = inputs[1:3]
        layer: StateLayer = inputs[3]
        n_heads, key_dim, value_dim = layer.shape
        out = mixed.new_zeros(len(mixed), n_heads, value_dim)
        for sequence in layer.sequences():
            state, pending = sequence.read()  # pending: (tokens, heads, k | v | decay | beta)
            queries, own = self._rows(mixed[sequence.rows], decay[sequence.rows], beta[sequence.rows], state)
            for token in pending:
                state = _step(state, token, key_dim)
            folded = state
            for i, (query, token) in enumerate(zip(queries, own, strict=True)):
                state = _step(state, token, key_dim)
                out[sequence.rows.start + i] = torch.einsum("hkv,hk->hv", state, query) * key_dim**-0.5
                if i + 1 == sequence.n_folded:
                    folded = state
            sequence.write(folded, own[sequence.n_folded :])
        return out

    def _rows(
        self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (rows, value heads, key dim), and what is stored of pending rows."""
        n_heads, key_dim, value_dim = state.shape
        n_keys = n_key_heads(mixed.shape[1], tuple(state.shape))
        n_columns = n_keys * key_dim
        q, k, v = mixed[:, :n_columns], mixed[:, n_columns : 2 * n_columns], mixed[:, 2 * n_columns :]
        q, k = (x.reshape(len(mixed), n_keys, key_dim) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps) for x in (q, k))
        times = n_heads // max(n_keys, 1)
        q, k = (
            x.repeat(1, times, 1) if self.is_cyclic else x.repeat_interleave(times, dim=1) for x in (q, k)
        )
        gates = (decay[:, :, None], beta[:, :, None])
        return q, torch.cat([k, v.reshape(len(mixed), n_heads, value_dim), *gates], dim=-1)

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        """Split by key heads with their value heads, which are independent."""
        mixed, _, _, state = inputs
        for known, axis in zip(states[1:], (1, 1, 0), strict=True):
            if not isinstance(known, Split) or known.axis != axis:
                continue
            word = self.mixed_word(known.word, n_key_heads(mixed.shape[1], state.shape), state.shape)
            if word is not None:
                values = Split(1, known.word)
                yield Way((Split(1, word), values, values, Split(0, known.word)), values)

    def mixed_word(self, values: Word, n_keys: int, state: Shape) -> Word | None:
        """The word of the columns of `mixed`, from that of value heads; None if it separates heads of one key."""
        n_heads, key_dim, value_dim = state
        times = n_heads // max(n_keys, 1)
        keys = values.factor_inner(times) if self.is_cyclic else values.factor_outer(times)
        if keys is None:
            return None
        return Word.concat([keys.stretch(key_dim), keys.stretch(key_dim), values.stretch(value_dim)])


def n_key_heads(width: int, state: Shape) -> int:
    """The number of key heads, from the columns of q | k | v and the shape of the state."""
    n_heads, key_dim, value_dim = state
    return (width - n_heads * value_dim) // (2 * key_dim) if key_dim else 0


def _step(state: torch.Tensor, token: torch.Tensor, key_dim: int) -> torch.Tensor:
    """The state (heads, key dim, value dim) after one token (heads, k | v | decay | beta)."""
    key, value, decay, beta = token[:, :key_dim], token[:, key_dim:-2], token[:, -2:-1], token[:, -1:]
    state = state * decay.exp()[..., None]
    delta = beta * (value - torch.einsum("hkv,hk->hv", state, key))
    return state + key[:, :, None] * delta[:, None, :]
