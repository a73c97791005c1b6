"""Where weights go, from the proportions that were asked for.

Weights are known by their GGUF names; activations follow from the graph. Attention is cut at KV heads with their
query groups, the FFN at multiples of the quant block of the matrix that its columns meet, the output matrix at
vocabulary rows. Embeddings are looked up from the mapped file by every device: a row is all that is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from motley.errors import SplitError
from motley.formats import get_format
from motley.graph import Tensor
from motley.models import DecoderParams
from motley.ownership import Split, State, Word
from motley.split.apportion import Apportioner

TENSOR, LAYER, NONE = "tensor", "layer", "none"
SPLIT_MODES = (NONE, LAYER, TENSOR)


@dataclass(frozen=True)
class Placement:
    """States of weights and cache layers by name; what is not named is mirrored, a cache layer follows its keys.

    `kv_repeat`: how many times each KV head is stored (see `choose_kv_repeat`).
    """

    states: Mapping[str, State]
    kv_repeat: int = 1


def place(mode: str, weights: Sequence[Tensor], params: DecoderParams, shares: Sequence[Fraction]) -> Placement:
    """Share the weights out over `len(shares)` devices."""
    if mode == LAYER or len(shares) == 1:
        return _place_layers(weights, params, shares)
    return _TensorPlacement(weights, params, shares).place()


def choose_kv_repeat(weights: Sequence[Tensor], params: DecoderParams, shares: Sequence[Fraction]) -> int:
    """How many copies of each KV head let every device with a share have heads, if the granule allows that.

    With more devices than KV heads, the query heads of one KV head are shared out and that KV head is stored by each
    device that has some of them. The cuts go through the output matrix's columns, so between quant blocks.
    """
    n_devices = sum(share > 0 for share in shares)
    group = params.n_heads // params.n_kv_heads
    blocks = [_block_size(w) for w in weights if w.name.endswith("attn_output.weight")]

    def n_units(repeat: int) -> int:
        sizes = (_head_unit(block, params.head_dim, group // repeat) for block in blocks)
        return min((-(-params.n_kv_heads * repeat // size) for size in sizes), default=0)

    best = 1
    for repeat in (r for r in range(2, group + 1) if group % r == 0):
        if n_units(best) >= n_devices:
            break
        if n_units(repeat) > n_units(best):
            best = repeat
    return best


def _place_layers(weights: Iterable[Tensor], params: DecoderParams, shares: Sequence[Fraction]) -> Placement:
    """Whole layers, in order; what comes after the last layer is where that is."""
    counts = Apportioner(shares).share_out(params.n_layers)
    device_of = [device for device, n in enumerate(counts) for _ in range(n)]
    states: dict[str, State] = {}
    for weight in weights:
        if weight.name.startswith("blk."):
            device = device_of[int(weight.name.split(".")[1])]
        elif weight.name.startswith("output"):
            device = device_of[-1]
        else:
            continue
        states[weight.name] = Split(0, Word.of(device, weight.shape[0]))
    return Placement(states)


class _TensorPlacement:
    def __init__(self, weights: Sequence[Tensor], params: DecoderParams, shares: Sequence[Fraction]) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self._params = params
        self._shares = shares
        self._repeat = choose_kv_repeat(weights, params, shares)
        self._heads = Apportioner(shares)
        self._ffn = Apportioner(shares)
        self._states: dict[str, State] = {}

    def place(self) -> Placement:
        for layer in range(self._params.n_layers):
            heads = self._place_attention(f"blk.{layer}.")
            self._place_ffn(f"blk.{layer}.", heads)
        output = self._weights["output.weight"]
        self._cut("output.weight", 0, Word.run(Apportioner(self._shares).share_out(output.shape[0])))
        return Placement(self._states, self._repeat)

    def _place_attention(self, prefix: str) -> tuple[int, ...]:
        """Cut the layer's attention; returns how many (virtual) KV heads each device has."""
        p, repeat = self._params, self._repeat
        group = p.n_heads // p.n_kv_heads // repeat
        unit = _head_unit(_block_size(self._weights[f"{prefix}attn_output.weight"]), p.head_dim, group)
        heads = _in_units(self._heads, p.n_kv_heads * repeat, unit)
        kv = Word.run(heads).stretch(p.head_dim)
        q = Word.run(heads).stretch(group * p.head_dim)
        self._states[f"cache.{prefix.split('.')[1]}"] = Split(0, Word.run(heads))
        self._cut(f"{prefix}attn_output.weight", 1, q)
        self._cut(f"{prefix}attn_q.weight", 0, q)
        if repeat == 1:  # copies of KV heads come of mirrored matrices, which are small
            self._cut(f"{prefix}attn_k.weight", 0, kv)
            self._cut(f"{prefix}attn_v.weight", 0, kv)
            self._cut(f"{prefix}attn_qkv.weight", 0, q + kv + kv)
        return heads

    def _place_ffn(self, prefix: str, heads: tuple[int, ...]) -> None:
        n_ff, down = self._params.n_ff, self._weights[f"{prefix}ffn_down.weight"]
        is_idle = any(share > 0 and not n for share, n in zip(self._shares, heads, strict=True))
        apportioner = Apportioner(self._shares_left(prefix, heads)) if is_idle else self._ffn
        word = Word.run(_in_units(apportioner, n_ff, _block_size(down)))
        is_fused = f"{prefix}ffn_gate.weight" not in self._weights
        self._cut(f"{prefix}ffn_gate.weight", 0, word)
        self._cut(f"{prefix}ffn_up.weight", 0, word + word if is_fused else word)
        self._cut(f"{prefix}ffn_down.weight", 1, word)

    def _shares_left(self, prefix: str, heads: tuple[int, ...]) -> list[Fraction]:
        """Shares of the FFN that make up for attention: a device without heads takes more columns."""
        attention = self._n_bytes(prefix, "attn_")
        ffn = self._n_bytes(prefix, "ffn_")
        total = sum(self._shares, Fraction(0))
        wanted = [
            max(Fraction(0), share / total * (attention + ffn) - Fraction(n, sum(heads)) * attention)
            for share, n in zip(self._shares, heads, strict=True)
        ]
        return wanted if any(wanted) else list(self._shares)

    def _n_bytes(self, prefix: str, part: str) -> int:
        return sum(
            w.n_values * get_format(w.dtype).block_bytes // get_format(w.dtype).block_size
            for name, w in self._weights.items()
            if name.startswith(prefix + part)
        )

    def _cut(self, name: str, axis: int, word: Word) -> None:
        weight = self._weights.get(name)
        if weight is None:
            return
        state = Split(axis, word)
        if not state.fits(weight.shape):
            raise SplitError(name, [state], f"does not fit a weight of shape {weight.shape}")
        self._states[name] = state


def _block_size(weight: Tensor) -> int:
    return get_format(weight.dtype).block_size


def _head_unit(block: int, head_dim: int, group: int) -> int:
    """The fewest KV heads whose queries' outputs are whole quant blocks of the matrix that they meet."""
    width = group * head_dim
    return lcm(block, width) // width


def _in_units(apportioner: Apportioner, n: int, unit: int) -> tuple[int, ...]:
    """Share out `n` in units of `unit`; the last unit may be short."""
    counts = [c * unit for c in apportioner.share_out(-(-n // unit))]
    last = max((i for i, c in enumerate(counts) if c), default=0)
    counts[last] -= sum(counts) - n
    return tuple(counts)
