"""Where weights go: whole heads, whole quant blocks, and no more than a granule from what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.formats import get_format
from motley.graph import Tensor
from motley.graph.ops import Weight
from motley.graph.roles import COLUMNS, EXPERTS, FFN, HEADS, KEYS, QUERIES, ROUTER, VOCABULARY, Role
from motley.models import DecoderParams
from motley.models.params import RopeScaling
from motley.ownership import Split, State, Word, sole_owner
from motley.split.placement import LAYER, TENSOR, choose_kv_repeat, place

MODEL = DecoderParams(
    architecture="llama",
    n_layers=12,
    n_embd=512,
    n_heads=16,
    n_kv_heads=8,
    head_dim=32,
    n_ff=1536,
    n_vocab=4000,
    n_ctx_train=128,
    norm_eps=1e-5,
    rope_dims=32,
    rope_base=1e4,
    rope_scaling=RopeScaling(),
    attention_scale=1.0,
    sliding_window=None,
)
SHARES = (
    st.lists(st.integers(0, 8), min_size=2, max_size=7).filter(any).map(lambda s: [Fraction(n) for n in s])
)
SETTINGS = settings(deadline=None, max_examples=40)
FORMATS = st.sampled_from(["F16", "Q8_0", "Q4_K"])


def weights_of(p: DecoderParams, form: str = "F16", is_fused: bool = False, repeat: int = 1) -> list[Tensor]:
    """A Llama-like model's matrices, each KV head `repeat` times."""
    n_q, n_kv = p.n_heads * p.head_dim, p.n_kv_heads * repeat * p.head_dim
    rows = {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv, "ffn_gate": p.n_ff, "ffn_up": p.n_ff}
    if is_fused:
        rows = {"attn_qkv": n_q + 2 * n_kv, "ffn_up": 2 * p.n_ff}
    sizes = {name: (n, p.n_embd) for name, n in rows.items()}
    sizes |= {"attn_output": (p.n_embd, n_q), "ffn_down": (p.n_embd, p.n_ff)}
    layers = [
        Weight(size, form, name, (), Role(group, layer, axis, units))(name=f"blk.{layer}.{name}.weight")
        for layer in range(p.n_layers)
        for name, size in sizes.items()
        for group, axis, units in [role_of(name, is_fused)]
    ]
    output = Weight((p.n_vocab, p.n_embd), form, "output", (), Role(VOCABULARY))
    return [*layers, output(name="output.weight")]


def role_of(name: str, is_fused: bool) -> tuple[str, int, tuple[str, ...]]:
    """Group, cut axis and units."""
    match name:
        case "attn_q":
            return HEADS, 0, (QUERIES,)
        case "attn_k" | "attn_v":
            return HEADS, 0, (KEYS,)
        case "attn_qkv":
            return HEADS, 0, (QUERIES, KEYS, KEYS)
        case "attn_output":
            return HEADS, 1, (QUERIES,)
        case "ffn_down":
            return FFN, 1, (COLUMNS,)
        case _:
            return FFN, 0, (COLUMNS, COLUMNS) if is_fused else (COLUMNS,)


def n_bytes(weight: Tensor, state: State, device: int) -> int:
    assert isinstance(state, Split)
    form, share = get_format(weight.dtype), state.word.count(device)
    total = weight.n_values // form.block_size * form.block_bytes
    return total * share // weight.shape[state.axis]


def word_of(states: Mapping[str, State], name: str) -> Word:
    state = states[name]
    assert isinstance(state, Split)
    return state.word


@settings(SETTINGS)
@given(SHARES, FORMATS, st.booleans())
def test_bytes_are_within_a_granule_of_the_proportions(
    shares: list[Fraction], form: str, is_fused: bool
) -> None:
    weights = weights_of(MODEL, form, is_fused)
    placement = place(TENSOR, weights, MODEL, shares).states
    total = sum(n_bytes(w, placement[w.name], d) for w in weights for d in range(len(shares)))
    layer = total / (MODEL.n_layers + 1)
    n_granules = MODEL.n_ff // 256 if form == "Q4_K" else MODEL.n_kv_heads  # the coarser: heads, or blocks
    granule = layer / n_granules
    for device, share in enumerate(shares):
        got = sum(n_bytes(w, placement[w.name], device) for w in weights)
        assert abs(got - total * share / sum(shares)) <= granule
        assert share or not got


@settings(SETTINGS)
@given(SHARES, FORMATS)
def test_heads_do_not_drift_over_layers(shares: list[Fraction], form: str) -> None:
    """The cache is shared out as the model is: at any depth within one unit of heads."""
    placement = place(TENSOR, weights_of(MODEL, form), MODEL, shares).states
    unit = 256 // (2 * MODEL.head_dim) if form == "Q4_K" else 1
    given_out = [0] * len(shares)
    for layer in range(MODEL.n_layers):
        counts = word_of(placement, f"cache.{layer}").counts(len(shares))
        given_out = [a + b for a, b in zip(given_out, counts, strict=True)]
        for got, share in zip(given_out, shares, strict=True):
            assert abs(got - (layer + 1) * MODEL.n_kv_heads * share / sum(shares)) < unit


@settings(SETTINGS)
@given(SHARES, FORMATS, st.booleans())
def test_matrices_that_meet_are_cut_alike(shares: list[Fraction], form: str, is_fused: bool) -> None:
    weights = weights_of(MODEL, form, is_fused)
    placement = place(TENSOR, weights, MODEL, shares).states
    block = get_format(form).block_size
    for layer in range(MODEL.n_layers):
        prefix = f"blk.{layer}."
        heads = word_of(placement, f"cache.{layer}")
        kv, q = heads.stretch(MODEL.head_dim), heads.stretch(2 * MODEL.head_dim)
        columns = word_of(placement, prefix + "ffn_down.weight")
        assert placement[prefix + "attn_output.weight"] == Split(1, q)
        assert placement[prefix + "ffn_down.weight"] == Split(1, columns)
        assert q.factor_outer(block) is not None
        assert columns.factor_outer(block) is not None
        if is_fused:
            assert placement[prefix + "attn_qkv.weight"] == Split(0, q + kv + kv)
            assert placement[prefix + "ffn_up.weight"] == Split(0, columns + columns)
        else:
            assert placement[prefix + "attn_q.weight"] == Split(0, q)
            assert placement[prefix + "attn_k.weight"] == placement[prefix + "attn_v.weight"] == Split(0, kv)
            assert placement[prefix + "ffn_gate.weight"] == placement[prefix + "ffn_up.weight"]
            assert placement[prefix + "ffn_up.weight"] == Split(0, columns)


@settings(SETTINGS)
@given(SHARES)
def test_layers_go_whole_and_in_order(shares: list[Fraction]) -> None:
    weights = weights_of(MODEL)
    placement = place(LAYER, weights, MODEL, shares).states
    owners = [{word_of(placement, w.name).sole_owner for w in weights if w.name.startswith(f"blk.{i}.")}
              for i in range(MODEL.n_layers)]  # fmt: skip
    flat = [owner for (owner,) in owners if owner is not None]
    assert len(flat) == MODEL.n_layers
    assert flat == sorted(flat)
    assert word_of(placement, "output.weight").sole_owner in (0, flat[-1])
    for device, share in enumerate(shares):
        assert abs(flat.count(device) - MODEL.n_layers * share / sum(shares)) < 1


@pytest.mark.parametrize(
    ("shares", "owner"),
    [([15, 1], 0), ([1, 15], 1), ([1, 1], 1), ([0, 1], 1), ([1, 0], 0), ([3, 1], 0), ([1, 2, 3], 2)],
)
def test_the_output_matrix_is_where_the_shares_are_met_best(shares: list[int], owner: int) -> None:
    weights, fractions = weights_of(MODEL), [Fraction(share) for share in shares]
    assert word_of(place(LAYER, weights, MODEL, fractions).states, "output.weight").sole_owner == owner
    with_last = place(LAYER, weights, MODEL, fractions, keeps_output_last=True).states
    last_layer = word_of(with_last, f"blk.{MODEL.n_layers - 1}.attn_q.weight")
    assert word_of(with_last, "output.weight").sole_owner == last_layer.sole_owner


@pytest.mark.parametrize(
    ("form", "n_kv_heads", "n_devices", "repeat"),
    [
        ("F16", 8, 4, 1),
        ("F16", 2, 2, 1),
        ("F16", 2, 3, 2),
        ("F16", 2, 4, 2),
        ("F16", 2, 5, 4),
        ("F16", 2, 7, 4),
        ("F16", 2, 9, 8),
        ("F16", 1, 7, 8),
        ("Q8_0", 2, 7, 4),
        ("Q4_K", 2, 3, 1),  # a KV head's queries are one quant block: it cannot be shared out
    ],
)
def test_kv_heads_are_copied_as_often_as_every_device_needs(
    form: str, n_kv_heads: int, n_devices: int, repeat: int
) -> None:
    params = replace(MODEL, n_kv_heads=n_kv_heads)
    shares = [Fraction(1)] * n_devices
    assert choose_kv_repeat(weights_of(params, form), params, shares) == repeat
    weights = weights_of(params, form, repeat=repeat)
    counts = word_of(place(TENSOR, weights, params, shares, repeat).states, "cache.0").counts(n_devices)
    assert sum(counts) == n_kv_heads * repeat
    assert all(counts) == (form != "Q4_K")


def experts_of(form: str, n_experts: int, n_ff: int, n_embd: int = 512, n_layers: int = 4) -> list[Tensor]:
    sizes = {
        "gate": (n_experts, n_ff, n_embd),
        "up": (n_experts, n_ff, n_embd),
        "down": (n_experts, n_embd, n_ff),
    }
    return [
        Weight(size, form, name, (), Role(EXPERTS, layer, 2 if name == "down" else 1, (COLUMNS,)))(
            name=f"{layer}.{name}"
        )
        for layer in range(n_layers)
        for name, size in sizes.items()
    ]


@settings(SETTINGS)
@given(SHARES, FORMATS, st.sampled_from([4, 32, 128]), st.sampled_from([256, 768, 1024]))
def test_experts_are_cut_alike_and_near_the_shares(
    shares: list[Fraction], form: str, n_experts: int, n_ff: int
) -> None:
    """Whichever way is chosen, and whichever is asked for: no quant block is cut, and bytes are within a unit."""
    params, weights = replace(MODEL, n_layers=4), experts_of(form, n_experts, n_ff)
    block, total = get_format(form).block_size, sum(shares)
    for asked in ("auto", "ffn", "whole"):
        placement = place(TENSOR, weights, params, shares, experts=asked)
        assert placement.experts is not None
        assert asked in ("auto", placement.experts.way)
        is_whole = placement.experts.way == "whole"
        unit = Fraction(1, n_experts) if is_whole else Fraction(max(block, 32), n_ff)
        for layer in range(4):
            gate, up, down = (placement.states[f"{layer}.{name}"] for name in ("gate", "up", "down"))
            assert isinstance(down, Split)
            assert gate == up == Split(0 if is_whole else 1, down.word)
            assert down.axis == (0 if is_whole else 2)
            assert is_whole or down.word.factor_outer(block) is not None
        for device, share in enumerate(shares):
            words = [word_of(placement.states, f"{layer}.down") for layer in range(4)]
            got = sum(Fraction(word.count(device), len(word)) for word in words)
            assert abs(got - 4 * share / total) <= unit
            assert share or not got


@settings(SETTINGS)
@given(SHARES, st.sampled_from([1, 2, 4]), st.sampled_from(["ffn", "whole"]))
def test_a_router_is_with_the_experts_if_one_device_has_them_all(
    shares: list[Fraction], n_experts: int, way: str
) -> None:
    experts = experts_of("Q4_K", n_experts, 256)
    routers = [
        Weight((n_experts, 512), "F32", "router", (), Role(ROUTER, layer))(name=f"{layer}.router")
        for layer in range(4)
    ]
    placement = place(TENSOR, [*experts, *routers], replace(MODEL, n_layers=4), shares, experts=way)
    for layer in range(4):
        owner = sole_owner(placement.states[f"{layer}.down"])
        expected = None if owner is None else Split(0, Word.of(owner, n_experts))
        assert placement.states.get(f"{layer}.router") == expected


def test_columns_are_preferred_where_they_come_near() -> None:
    """All devices then have work for every token."""
    cases = {
        ("Q4_K", 768, (1, 1, 1)): "ffn",  # three blocks of 256 for three devices
        ("Q4_K", 768, (1, 1)): "whole",  # ... not for two
        ("Q8_0", 1408, (3, 1)): "ffn",  # 44 blocks of 32
    }
    for (form, n_ff, shares), way in cases.items():
        placement = place(
            TENSOR, experts_of(form, 128, n_ff), replace(MODEL, n_layers=4), [Fraction(s) for s in shares]
        )
        assert placement.experts is not None
        assert placement.experts.way == way


def test_a_crew_larger_than_all_heads_leaves_the_surplus_to_the_ffn() -> None:
    params = replace(MODEL, n_heads=2, n_kv_heads=2)
    weights = weights_of(params)
    placement = place(TENSOR, weights, params, [Fraction(1)] * 5).states
    assert sorted(word_of(placement, "cache.0").counts(5)) == [0, 0, 0, 1, 1]
    totals = [sum(n_bytes(w, placement[w.name], device) for w in weights) for device in range(5)]
    assert max(totals) - min(totals) < 0.05 * max(totals)
