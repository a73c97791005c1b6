"""Steps that build random graphs: one for each op.

Values stay of the order of one and choices by size (top-k) are never close, so that rounding cannot change a result
by more than the tolerance of a comparison.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from split_values import CacheValue, source

from motley.formats import FORMATS, PackedTensor
from motley.graph import Shape, Tensor
from motley.graph.ops import (
    HALVES,
    INTERLEAVED,
    SIGMOID,
    SOFTMAX,
    Activation,
    Add,
    Attention,
    BatchMatMul,
    CacheStore,
    Concat,
    ExpertFfn,
    GetRows,
    Hadamard,
    LocalIds,
    MatMul,
    Mul,
    Permute,
    Repeat,
    Reshape,
    RmsNorm,
    Rope,
    Route,
    RouteWeights,
    Scale,
    SetRows,
    Slice,
    Softmax,
    Weight,
)
from motley.ownership import Word

SIZES = (1, 2, 2, 3, 4, 4, 6)
N_ROWS = (0, *SIZES)  # that are chosen from a table: a batch may want none
PACKED_SIZES = (32, 64)
MAX_VALUES = 1500  # of a tensor: what grows beyond is not built on


@dataclass
class GraphMaker:
    """Builds a graph step by step from `rng`; each step takes tensors made before and may bring new inputs."""

    rng: random.Random
    values: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)  # float, of one axis or more; there may be no rows
    choices: list[tuple[Tensor, int]] = field(default_factory=list)  # i32 (tokens, k), and of how many
    experts: list[list[Tensor]] = field(
        default_factory=list
    )  # of one step: gate, up and down, and their biases
    seed: int = 0

    def draw(self, *shape: int) -> torch.Tensor:
        """Standard normal values; the same for the same steps, so that failing examples shrink."""
        self.seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))

    def bring(self, value: Any, name: str) -> Tensor:
        """A new input or weight."""
        name = f"{name}{len(self.values)}"
        self.values[name] = value
        return source(value, name)

    def input(self, *shape: int) -> Tensor:
        return self.bring(self.draw(*shape), "x")

    def weight(self, *shape: int) -> Tensor:
        """Rows of length 1 or so, packed in blocks where they are long enough; some of them chosen from a source."""
        name = self.rng.choice(["Q8_0", "Q4_0", "F32"]) if shape[-1] % 32 == 0 else "F32"
        values = self.draw(*shape) / shape[-1] ** 0.5
        weight = self.bring(PackedTensor.pack(values, FORMATS[name]), "w")
        if len(shape) == 1 or self.rng.random() < 0.8:
            return weight
        rows = [self.rng.randrange(shape[0]) for _ in range(shape[0])]
        return Weight(shape, name, weight.name, tuple((row, row + 1) for row in rows))(name=weight.name)

    def ids(self, n: int, below: int, lowest: int = 0) -> Tensor:
        chosen = [self.rng.randrange(lowest, below) for _ in range(n)]
        return self.bring(torch.tensor(chosen, dtype=torch.int32), "ids")

    def pick(self, is_fit: Callable[[Shape], bool] = lambda shape: True) -> Tensor | None:
        """A tensor made before, more likely a late one."""
        found = [t for t in self.tensors if is_fit(t.shape)]
        if not found:
            return None
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]

    def like(self, *shape: int) -> Tensor:
        """A tensor of this shape: one made before, or a new input."""
        found = self.pick(lambda s: s == shape)
        return found if found is not None and self.rng.random() < 0.7 else self.input(*shape)

    def size(self) -> int:
        return self.rng.choice(SIZES)

    def keep(self, tensor: Tensor) -> None:
        if tensor.shape and all(tensor.shape[1:]) and tensor.n_values <= MAX_VALUES:
            self.tensors.append(tensor)


Step = Callable[[GraphMaker], Tensor | None]


def _pairwise(op: Add | Mul) -> Step:
    def step(make: GraphMaker) -> Tensor | None:
        x = make.pick()
        if x is None:
            return None
        shape = x.shape[make.rng.randrange(len(x.shape)) :]
        other = make.rng.randrange(4)
        if other == 0:
            return op(x, make.weight(*shape))
        if other == 1:
            axis = make.rng.randrange(len(shape))
            return op(x, make.like(*shape[:axis], 1, *shape[axis + 1 :]))
        return op(x, make.like(*x.shape))

    return step


def _scale(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    return x and Scale(make.rng.choice([-1.0, 0.5]))(x)


def _activation(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    return x and Activation(make.rng.choice(["silu", "gelu", "relu", "tanh", "sigmoid"]))(x)


def _softmax(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    return x and Softmax()(x)


def _rms_norm(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    if x is None:
        return None
    return RmsNorm(0.1)(x, make.weight(x.shape[-1])) if make.rng.random() < 0.7 else RmsNorm(0.1)(x)


def _matmul(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    if x is None:
        return None
    k = x.shape[-1]
    if make.rng.random() < 0.2:
        other = make.pick(lambda s: len(s) == 2 and s[1] == k)
        if other is not None:
            return MatMul()(x, other)
    return MatMul()(x, make.weight(make.rng.choice([*SIZES, *PACKED_SIZES]), k))


def _hadamard(make: GraphMaker) -> Tensor | None:
    """The rotation: rows of a power of two, one product, and back."""
    x = make.pick(lambda s: s[-1] % 2 == 0)
    if x is None:
        return None
    n = make.rng.choice([n for n in (2, 4, 8, 32) if x.shape[-1] % n == 0])
    rows = Reshape((x.n_values // n, n))(x)
    return Reshape(x.shape)(MatMul()(rows, Hadamard(n)()))


def _batch_matmul(make: GraphMaker) -> Tensor | None:
    a = make.pick(lambda s: len(s) >= 2)
    if a is None:
        return None
    return BatchMatMul()(a, make.like(*a.shape[:-2], a.shape[-1], make.size()))


def _heads(make: GraphMaker) -> Tensor | None:
    """Something of the shape (tokens, heads, dim)."""
    x = make.pick(lambda s: len(s) == 3 and s[2] % 2 == 0)
    if x is not None and make.rng.random() < 0.6:
        return x
    x = make.pick(lambda s: len(s) == 2)
    if x is None:
        return None
    heads, dim = make.rng.choice([1, 2, 3, 4, 6]), make.rng.choice([2, 4])
    return Reshape((x.shape[0], heads, dim))(MatMul()(x, make.weight(heads * dim, x.shape[1])))


def _rope(make: GraphMaker) -> Tensor | None:
    x = _heads(make)
    if x is None:
        return None
    n_dims, style = make.rng.choice([2, x.shape[2]]), make.rng.choice([INTERLEAVED, HALVES])
    divisors = [make.bring(_plain(make.draw(n_dims // 2).abs() + 1), "w")] if make.rng.random() < 0.3 else []
    return Rope(n_dims, style=style)(x, make.ids(x.shape[0], 50), *divisors)


def _plain(value: torch.Tensor) -> PackedTensor:
    return PackedTensor.pack(value, FORMATS["F32"])


def _attention(make: GraphMaker) -> Tensor | None:
    q = _heads(make)
    if q is None or not q.shape[0]:
        return None
    tokens, heads, dim = q.shape
    kv_heads = make.rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    keys, values = make.like(tokens, kv_heads, dim), make.like(tokens, kv_heads, dim)
    rng = random.Random(make.rng.randrange(100))
    cache = make.bring(CacheValue.random(rng, tokens, kv_heads, dim), "cache")
    stored = CacheStore()(cache, keys, values)
    return Attention(dim**-0.5, make.rng.choice([None, None, 2]))(q, stored)


def _reshape(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    if x is None:
        return None
    sizes = list(x.shape)
    for _ in range(make.rng.randint(1, 3)):
        i = make.rng.randrange(len(sizes))
        if make.rng.random() < 0.5 and i + 1 < len(sizes):
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
        elif len(sizes) < 4:
            divisor = make.rng.choice([n for n in range(1, sizes[i] + 1) if sizes[i] % n == 0] or [1])
            sizes[i : i + 1] = [divisor, sizes[i] // divisor]
    return Reshape(tuple(sizes))(x)


def _permute(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    return x and Permute(tuple(make.rng.sample(range(len(x.shape)), len(x.shape))))(x)


def _slice(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    if x is None:
        return None
    axis = make.rng.randrange(len(x.shape))
    start = make.rng.randint(0, x.shape[axis])
    return Slice(axis, start, make.rng.randint(start, x.shape[axis]))(x)


def _concat(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    if x is None:
        return None
    axis = make.rng.randrange(len(x.shape))
    others = [
        make.like(*x.shape[:axis], make.rng.choice([x.shape[axis], make.size()]), *x.shape[axis + 1 :])
        for _ in range(make.rng.randint(1, 2))
    ]
    return Concat(axis)(x, *others)


def _repeat(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    return x and Repeat(make.rng.randrange(len(x.shape)), make.rng.randint(1, 3))(x)


def _get_rows(make: GraphMaker) -> Tensor | None:
    if make.rng.random() < 0.3:
        n = make.size()
        table = make.weight(n, make.rng.choice([3, 32, 64]))
        return GetRows()(table, make.ids(make.rng.choice(N_ROWS), n))
    x = make.pick()
    return x and GetRows()(x, make.ids(make.rng.choice(N_ROWS), x.shape[0], -1))


def _set_rows(make: GraphMaker) -> Tensor | None:
    x = make.pick()
    if x is None:
        return None
    n = make.size()
    return SetRows()(x, make.ids(n, x.shape[0], -1), make.like(n, *x.shape[1:]))


def _local_ids(make: GraphMaker) -> Tensor | None:
    """Rows of one virtual device's part of a table."""
    x, n = make.pick(), make.size()
    if x is None:
        return None
    word = Word.run([make.rng.randint(0, 2), x.shape[0], make.rng.randint(0, 2)])
    return GetRows()(x, LocalIds(word, 1)(make.ids(n, len(word), -1)))


def _route(make: GraphMaker) -> Tensor | None:
    """Weights of chosen experts; the choice itself is kept for later steps."""
    x = make.pick(lambda s: len(s) == 2)
    if x is None:
        return None
    n_tokens, n_experts = x.shape
    spread = make.bring(_plain(0.7 * torch.arange(n_experts)), "w")  # no two scores are equal
    logits = Add()(Activation("tanh")(x), spread)
    k, score = make.rng.randint(1, n_experts), make.rng.choice([SOFTMAX, SIGMOID])
    n_used = make.ids(n_tokens, k + 1)
    bias = [make.bring(torch.arange(n_experts) * 1.0, "x")] if make.rng.random() < 0.5 else []
    n_groups = make.rng.choice([n for n in (1, 2, 3) if n_experts % n == 0])
    route = Route(k, score, n_groups, make.rng.randint(1, n_groups))
    ids = route(logits, n_used, *bias)
    make.choices.append((ids, n_experts))
    return RouteWeights(score, make.rng.random() < 0.7, 1.5)(logits, ids)


def _expert_ffn(make: GraphMaker) -> Tensor | None:
    if not make.choices:
        _route(make)
    if not make.choices:
        return None
    ids, n_experts = make.rng.choice(make.choices)
    n_tokens, k = ids.shape
    x = make.pick(lambda s: len(s) == 2 and s[0] == n_tokens) or make.input(n_tokens, 3)
    n_embd, n_ff = x.shape[1], make.rng.choice([2, 32, 64])
    sizes = ((n_experts, n_ff, n_embd), (n_experts, n_ff, n_embd), (n_experts, n_embd, n_ff))
    matrices = [make.weight(*size) for size in sizes]
    function, biases = "silu", []
    if make.rng.random() < 0.5:
        function = "clamped_swiglu"
        biases = [make.bring(_plain(make.draw(n_experts, n)), "w") for n in (n_ff, n_ff, n_embd)]
    make.experts.append([*matrices, *biases])
    weights = Activation("sigmoid")(make.like(n_tokens, k))
    return ExpertFfn(function)(x, ids, weights, *matrices, *biases)


STEPS: dict[str, Step] = {
    "add": _pairwise(Add()),
    "mul": _pairwise(Mul()),
    "scale": _scale,
    "activation": _activation,
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "matmul": _matmul,
    "hadamard": _hadamard,
    "batch_matmul": _batch_matmul,
    "rope": _rope,
    "cache_store": _attention,
    "attention": _attention,
    "reshape": _reshape,
    "permute": _permute,
    "slice": _slice,
    "concat": _concat,
    "repeat": _repeat,
    "get_rows": _get_rows,
    "set_rows": _set_rows,
    "local_ids": _local_ids,
    "route": _route,
    "route_weights": _route,
    "expert_ffn": _expert_ffn,
}
"""For each op, a step that uses it."""
