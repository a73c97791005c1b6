"""The gated delta net: a layer with a recurrent state where other layers have attention."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import (
    CONVOLUTION,
    DELTA,
    Activation,
    Add,
    CausalConv,
    DeltaNet,
    Mul,
    Reshape,
    RmsNorm,
    Slice,
    StateInput,
)
from motley.graph.roles import DELTA as DELTA_GROUP
from motley.graph.roles import DELTA_GATES, DELTA_HEADS, DELTA_KEYS, DELTA_VALUES
from motley.models.builder import LayerBuilder


def delta_net(layer: LayerBuilder, x: Tensor) -> Tensor:
    """Convolution, gated delta rule, gated norm; x (tokens, embd) → (tokens, embd)."""
    p, n_tokens = layer.params.delta, x.shape[0]
    assert p is not None, "read with the model's other numbers"
    n_values, dim = p.n_value_heads, p.head_dim
    columns = layer.role(DELTA_GROUP, 0, DELTA_KEYS, DELTA_KEYS, DELTA_VALUES)
    qkv = layer.linear(x, "attn_qkv", p.n_channels, columns)
    z = layer.linear(x, "attn_gate", n_values * dim, layer.role(DELTA_GROUP, 0, DELTA_VALUES))
    weight = layer.vector("ssm_conv1d.weight", p.n_channels, p.n_taps, role=columns)
    window = StateInput.of(layer.index, CONVOLUTION, (p.n_taps - 1, p.n_channels))
    mixed = CausalConv()(qkv, weight, window, name=layer.label("ssm_conv"))
    decay, beta = _gates(layer, x)
    state = StateInput.of(layer.index, DELTA, (n_values, dim, dim))
    out = DeltaNet(is_cyclic=p.is_cyclic)(mixed, decay, beta, state, name=layer.label("delta_net"))
    norm = RmsNorm(layer.params.norm_eps)(out, layer.vector("ssm_norm.weight", dim))
    gate = Reshape((n_tokens, n_values, dim))(z)
    gated = Mul()(norm, Activation("silu")(gate), name=layer.label("ssm_gated"))
    flat = Reshape((n_tokens, n_values * dim))(gated)
    return layer.linear(flat, "ssm_out", layer.params.n_embd, layer.role(DELTA_GROUP, 1, DELTA_VALUES))


def _gates(layer: LayerBuilder, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the state's decay, and the strength of its change. (tokens, value heads) each"""
    p, n_tokens = layer.params.delta, x.shape[0]
    assert p is not None
    n_values, n_each = p.n_value_heads, p.n_value_heads // p.n_key_heads
    if not layer.is_fused("ssm_ba.weight", "ssm_beta.weight", "ssm_alpha.weight"):
        role = layer.role(DELTA_GROUP, 0, DELTA_HEADS)
        b, a = (layer.linear(x, name, n_values, role) for name in ("ssm_beta", "ssm_alpha"))
        return _decay(layer, a), Activation("sigmoid")(b, name=layer.label("ssm_strength"))
    both = layer.linear(x, "ssm_ba", 2 * n_values, layer.role(DELTA_GROUP, 0, DELTA_GATES))
    both = Reshape((n_tokens, p.n_key_heads, 2 * n_each))(both)
    b, a = (
        Reshape((n_tokens, n_values))(Slice(2, start, start + n_each)(both, name=layer.label(name)))
        for name, start in (("ssm_b", 0), ("ssm_a_in", n_each))
    )
    return _decay(layer, a), Activation("sigmoid")(b, name=layer.label("ssm_strength"))


def _decay(layer: LayerBuilder, a: Tensor) -> Tensor:
    """ssm_a · softplus(a + dt); the file stores ssm_a = -exp(A)."""
    step = Activation("softplus")(Add()(a, layer.vector("ssm_dt.bias", a.shape[1])))
    return Mul()(step, layer.vector("ssm_a", a.shape[1]), name=layer.label("ssm_decay"))
