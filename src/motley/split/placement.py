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
from motley.models import DecoderParams, cache_name
from motley.ownership import Split, State, Word
from motley.split.apportion import Apportioner, Turns

_LANES = 32  # columns and rows are not cut finer than this: kernels like whole vectors

TENSOR, LAYER, NONE = "tensor", "layer", "none"
SPLIT_MODES = (NONE, LAYER, TENSOR)


@dataclass(frozen=True)
class Placement:
    """States of weights and cache layers by name; what is not named is mirrored, a cache layer follows its keys."""

    states: Mapping[str, State]


def place(
    mode: str,
    weights: Sequence[Tensor],
    params: DecoderParams,
    shares: Sequence[Fraction],
    kv_repeat: int = 1,
) -> Placement:
    """Share out the weights of a graph in which each KV head stands `kv_repeat` times, over `len(shares)` devices."""
    if mode == TENSOR and len(shares) > 1:
        return _TensorPlacement(weights, params, shares, kv_repeat).place()
    return _place_layers(weights, params, shares)


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
    def __init__(
        self, weights: Sequence[Tensor], params: DecoderParams, shares: Sequence[Fraction], kv_repeat: int
    ) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self._params = params
        self._shares = shares
        self._repeat = kv_repeat
        self._heads = Turns(shares)  # KV heads by themselves: the cache is shared out as the model is
        self._bytes = Apportioner(shares)  # everything; FFN columns make up for the coarseness of heads
        self._states: dict[str, State] = {}

    def place(self) -> Placement:
        for layer in range(self._params.n_layers):
            self._place_attention(layer)
            self._place_ffn(layer)
        n_vocab = self._weights["output.weight"].shape[0]
        counts = self._bytes.share_out(*self._units(n_vocab, _LANES, ["output.weight"]))
        self._cut("output.weight", 0, _word(counts, _LANES, n_vocab))
        return Placement(self._states)

    def _place_attention(self, layer: int) -> None:
        p, repeat, prefix = self._params, self._repeat, f"blk.{layer}.attn_"
        group = p.n_heads // p.n_kv_heads // repeat
        unit = _head_unit(_block_size(self._weights[f"{prefix}output.weight"]), p.head_dim, group)
        names = ["q", "k", "v", "qkv", "output"]
        n_units, unit_bytes = self._units(p.n_kv_heads * repeat, unit, [f"{prefix}{n}.weight" for n in names])
        counts = self._heads.share_out(n_units)
        self._bytes.record(counts, unit_bytes)
        heads = _word(counts, unit, p.n_kv_heads * repeat)
        q, kv = heads.stretch(group * p.head_dim), heads.stretch(p.head_dim)
        self._states[cache_name(layer)] = Split(0, heads)
        self._cut(f"{prefix}output.weight", 1, q)
        self._cut(f"{prefix}q.weight", 0, q)
        self._cut(f"{prefix}k.weight", 0, kv)
        self._cut(f"{prefix}v.weight", 0, kv)
        self._cut(f"{prefix}qkv.weight", 0, q + kv + kv)

    def _place_ffn(self, layer: int) -> None:
        prefix = f"blk.{layer}.ffn_"
        down, gate, up = (f"{prefix}{name}.weight" for name in ("down", "gate", "up"))
        n_ff, unit = self._params.n_ff, lcm(_block_size(self._weights[down]), _LANES)
        word = _word(self._bytes.share_out(*self._units(n_ff, unit, [down, gate, up])), unit, n_ff)
        self._cut(gate, 0, word)
        self._cut(up, 0, word if gate in self._weights else word + word)
        self._cut(down, 1, word)

    def _units(self, n: int, unit: int, names: Sequence[str]) -> tuple[int, int]:
        """An axis of `n` that these weights have in common: how many units of `unit` it is, and their bytes."""
        n_units = -(-n // unit)
        n_bytes = sum(_n_bytes(self._weights[name]) for name in names if name in self._weights)
        return n_units, max(1, n_bytes // n_units)

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


def _word(counts: Sequence[int], unit: int, n: int) -> Word:
    """The word of an axis of `n` that was shared out in units; the last unit may be short."""
    lengths = [count * unit for count in counts]
    last = max(i for i, length in enumerate(lengths) if length)
    lengths[last] -= sum(lengths) - n
    return Word.run(lengths)


def _n_bytes(weight: Tensor) -> int:
    form = get_format(weight.dtype)
    return weight.n_values // form.block_size * form.block_bytes
