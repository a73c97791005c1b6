"""Compiles the CUDA kernels for GPUs that are not there. A process of its own: it needs TRITON_INTERPRET=0.

The kernels' wrappers are called as the backend calls them, so that signatures are those of real launches; the driver
is a stand-in, whose launches do nothing. Says which kernels do not compile, do not fit into a GPU's shared memory, or
are forgotten here, and fails then.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from motley.backends.cuda import kernels
from motley.backends.cuda.kernels.attention import Shares, Tables, attend
from motley.backends.cuda.kernels.bundles import attend_bundles
from motley.backends.cuda.kernels.bundles import supports as supports_bundles
from motley.backends.cuda.kernels.causal_conv import causal_conv
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.delta_net import Gates, delta_net
from motley.backends.cuda.kernels.experts import expert_hidden, expert_sum, operand_form
from motley.backends.cuda.kernels.gate import gated
from motley.backends.cuda.kernels.gated_norm import gated_norm
from motley.backends.cuda.kernels.grouped_experts import grouped_down, grouped_hidden, groups, slot_sums
from motley.backends.cuda.kernels.matmul import matmul
from motley.backends.cuda.kernels.matvec import Tile, matvec
from motley.backends.cuda.kernels.norm import rms_norm
from motley.backends.cuda.kernels.prefill import max_span_rows, prefill
from motley.backends.cuda.kernels.repack import repack
from motley.backends.cuda.kernels.rope_and_store import HeadNorms, RopeTable, rope_and_store
from motley.backends.cuda.kernels.route import local_ids, route, route_and_weigh, route_weights
from motley.backends.cuda.kernels.router import norm_and_logits
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows, convert
from motley.backends.cuda.kernels.scale_rows import scale_rows
from motley.backends.cuda.kernels.tagged import advance, fetch, post
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.kernels.unpack import unpack_by_value, unpack_rows
from motley.backends.cuda.library_attention import rehearse
from motley.backends.cuda.planes import WeightPlanes, to_planes
from motley.backends.cuda.sampler import DeviceSampler, RowSettings
from motley.backends.cuda.support import GATE_FUNCTIONS
from motley.formats import PackedTensor, get_format
from motley.graph.ops import SIGMOID, SOFTMAX, Route, RouteWeights
from motley.kvcache.store import Store
from motley.kvcache.types import get_cache_type

SHARED_MEMORY = {86: 99 << 10, 90: 227 << 10}  # bytes that a program may have, by the GPU's capability
CACHES = [  # types of K and V, dims of a head
    ("f16", "f16", 128),
    ("q8_0", "q4_0", 128),
    ("q4_0", "q8_0", 64),
    ("q5_1", "iq4_nl", 128),
]
WEIGHTS = ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"]
TARGETS = [
    (90, CACHES, WEIGHTS),
    (86, [*CACHES[:2], ("f16", "f16", 256)], ["Q4_K"]),  # older tensor cores and less memory: fewer, quicker
]
INTERPRETED_ONLY = {"motley.backends.cuda.kernels.bits._byte"}

BLOCK, KV_HEADS, GROUP, COLUMNS = 32, 2, 4, 512
HEADS = slice(0, KV_HEADS)

Case = tuple[str, Callable[[], object]]  # what it is, and the launch


def note_launches() -> list[str]:
    """From now on, the names of kernels that are launched are added to the returned list."""
    launched: list[str] = []
    run = JITFunction.run

    def note(self: JITFunction[object], *args: object, warmup: bool, **kwargs: object) -> object:
        if not warmup:
            launched.append(self.__name__)
        return run(self, *args, warmup=warmup, **kwargs)

    JITFunction.run = note
    return launched


class NoGpu:
    """What Triton asks of a driver. Devices are numbered by capability: kernels are cached by device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        binary = None, None, 0, 0, 1024  # module, function, registers, spills, most threads
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[device]},
            load_binary=lambda *_: binary,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        return lambda *_: None


def cache_planes(kind: str, dim: int) -> CachePlanes:
    store = Store(get_cache_type(kind), n_blocks=4, block_size=BLOCK, n_rows=KV_HEADS, head_dim=dim)
    return CachePlanes.of(kind, store.planes)


def attention_cases(k_kind: str, v_kind: str, dim: int) -> Iterator[Case]:
    n_rows, n_heads, kinds = 4, KV_HEADS * GROUP, f"({k_kind}, {v_kind}, {dim})"
    keys, values = (cache_planes(kind, dim) for kind in (k_kind, v_kind))
    numbers = torch.zeros(64, dtype=torch.int32)
    tables = Tables(numbers.view(4, 16), numbers[:4], numbers[:4], numbers[:4])
    qkv = torch.empty(n_rows, n_heads + 2 * KV_HEADS, dim)
    q, k, v = qkv.split([n_heads, KV_HEADS, KV_HEADS], 1)
    rotated, out = torch.empty(q.shape), torch.empty(q.shape)
    rope = RopeTable(torch.empty(dim // 2), dim, True, 1.0)
    rotates_k, rotates_v = k_kind != "f16", v_kind != "f16"
    yield f"rope_and_store{kinds}", partial(
        rope_and_store, q, k, v, numbers[:4], numbers[:4], rope, keys, values, HEADS, rotated,
        rotate_k=rotates_k, rotate_v=rotates_v,
        norms=HeadNorms(torch.empty(dim), torch.empty(dim), 1e-6) if k_kind == "f16" else None,
    )  # fmt: skip
    shares = Shares.empty(n_rows, n_heads, 16, dim, "cpu")
    yield f"attend{kinds}", partial(attend, rotated, keys, values, HEADS, tables, shares, scale=0.1)
    for most_rows in (4, 8, 16):
        bundles = Tables(
            numbers.view(4, 16), numbers[:4], numbers[:4], numbers[:4], most_rows, numbers[:4], numbers[:4],
            numbers[:8].view(4, 2),
        )  # fmt: skip
        if supports_bundles(k_kind, v_kind, dim, BLOCK):
            name = f"attend_bundles{kinds}, {most_rows} rows"
            yield name, partial(attend_bundles, rotated, keys, values, HEADS, bundles, shares, scale=0.1)
        elif most_rows == 4:
            name = f"attend{kinds}, bundles"
            yield name, partial(attend, rotated, keys, values, HEADS, bundles, shares, scale=0.1)
    yield f"prefill{kinds}", partial(
        prefill, rotated, keys, values, HEADS, numbers, numbers.view(-1, 4), out,
        span_rows=max_span_rows(k_kind, v_kind, dim), scale=0.1, rotate=rotates_v,
        sinks=torch.empty(n_heads) if k_kind == "f16" else None,
    )  # fmt: skip


def piece_cases() -> Iterator[Case]:
    for kind, rotation in (("q8_0", 128), ("f16", 1)):
        planes = cache_planes(kind, 128)
        yield f"pieces({kind})", partial(rehearse, planes, planes, HEADS, KV_HEADS * GROUP, 128, rotation)


def combine_cases() -> Iterator[Case]:
    numbers = torch.zeros(4, dtype=torch.int32)
    tables = Tables(numbers.view(1, 4), numbers[:1], numbers[:1], numbers[:1])
    for form, dim, n_splits in ((INT8, 128, 128), (PLAIN, 64, 16), (PLAIN, 80, 16), (HALVES, 128, 16)):
        shares, rows = (
            Shares.empty(1, 4, n_splits, dim, "cpu"),
            Rows.empty(form, 1, 4 * dim, "cpu", fixed=32),
        )
        launch = partial(combine, shares, tables, BLOCK, rows, rotate=dim != 80)
        yield f"combine({form}, {dim})", launch
        if form == INT8:
            yield f"combine({form}, {dim}, sinks)", partial(launch, sinks=torch.empty(4))


def row_cases(form: str) -> Iterator[Case]:
    x, out = torch.empty(2, COLUMNS), Rows.empty(form, 2, COLUMNS, "cpu")
    normed = Rows.empty(form, 2, COLUMNS, "cpu", fixed=16)
    ids = torch.zeros(2, dtype=torch.int32) if form == PLAIN else None
    yield f"convert({form})", partial(convert, x, out)
    yield f"rms_norm({form})", partial(rms_norm, x, torch.empty(COLUMNS), 1e-5, normed, ids)
    added = torch.empty(2, COLUMNS), torch.empty(2, COLUMNS)
    yield f"rms_norm({form}, a sum)", partial(rms_norm, x, torch.empty(COLUMNS), 1e-5, normed, added=added)
    for function in GATE_FUNCTIONS:
        yield f"gated({form}, {function})", partial(gated, torch.empty(2, 2 * COLUMNS), function, out)


def zeros(kind: str, n_rows: int) -> WeightPlanes:
    fmt = get_format(kind)
    n_bytes = COLUMNS // fmt.block_size * fmt.block_bytes
    return to_planes(PackedTensor(torch.zeros(n_rows, n_bytes, dtype=torch.uint8), fmt))


def product_cases(kind: str) -> Iterator[Case]:
    weight, tall = zeros(kind, 64), zeros(kind, 16384)
    row, out = Rows.empty(INT8, 1, COLUMNS, "cpu"), torch.empty(1, 64)
    yield f"matvec({kind})", partial(matvec, weight, row, out, out)
    yield f"matvec({kind}, a run of rows)", partial(matvec, weight, row, out, out, Tile(1, 512, 4))
    few, outs = Rows.empty(INT8, 3, COLUMNS, "cpu"), torch.empty(3, 64)
    yield f"matvec({kind}, 3 vectors)", partial(matvec, weight, few, outs, outs)
    for matrix, n_tokens in ((weight, 4), (weight, 64), (tall, 64)):
        rows, out = Rows.empty(HALVES, n_tokens, COLUMNS, "cpu"), torch.empty(n_tokens, matrix.n_rows)
        name = f"matmul({kind}, {matrix.n_rows} rows, {n_tokens} tokens)"
        yield name, partial(matmul, matrix, rows, out, torch.empty_like(out))
    dense = torch.empty(64, COLUMNS, dtype=torch.float16)
    yield f"unpack_by_value({kind})", partial(unpack_by_value, weight, dense)
    yield "scale_rows", partial(scale_rows, dense, torch.empty(64), torch.empty(64, COLUMNS))
    ids = torch.zeros(4, dtype=torch.int32)
    yield f"unpack_rows({kind})", partial(unpack_rows, weight, ids, torch.empty(4, COLUMNS))


def message_cases() -> Iterator[Case]:
    x, words, number = (
        torch.empty(256),
        torch.zeros(256, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int32),
    )
    yield "advance", partial(advance, number)
    yield "post", partial(post, x, words, number)
    yield "fetch", partial(fetch, words, x, number, number)
    yield "fetch, a sum", partial(fetch, words, x, number, number, x)


def repacking_cases() -> Iterator[Case]:
    packed = PackedTensor.pack(torch.randn(8, COLUMNS), get_format("Q4_K"))
    yield "repack", partial(repack, packed.data, to_planes(packed))


def sampling_cases() -> Iterator[Case]:
    sampler, settings = DeviceSampler(torch.device("cpu")), [RowSettings(0.8, 40)] * 2
    given = torch.zeros(2, 128256), settings, [0, 1], {1: [3]}, {1: {3: 0.5}}
    yield "sample", partial(sampler.launch, *given)


def expert_cases(kind: str) -> Iterator[Case]:
    n_experts, n_tokens, k = 4, 3, 2
    up, down = zeros(kind, n_experts * 64), zeros(kind, n_experts * 96)
    ids = torch.zeros(n_tokens, k, dtype=torch.int32)
    form = operand_form(up)
    x = Rows.empty(form, n_tokens, COLUMNS, "cpu")
    yield f"expert_hidden({kind})", partial(expert_hidden, up, up, n_experts, x, x, ids, form=form)
    hidden, weights = Rows.empty(form, n_tokens * k, COLUMNS, "cpu"), torch.empty(n_tokens, k)
    yield f"expert_sum({kind})", partial(expert_sum, down, n_experts, hidden, ids, weights)
    more = torch.zeros(8, k, dtype=torch.int32), torch.empty(8, k)
    wide = Rows.empty(form, 8 * k, COLUMNS, "cpu")
    yield f"expert_sum({kind}, 8 tokens)", partial(expert_sum, down, n_experts, wide, *more)
    if kind == "MXFP4":
        biases = torch.empty(n_experts, 64), torch.empty(n_experts, 64)
        clamped = partial(expert_hidden, up, up, n_experts, x, x, ids, biases, "clamped_swiglu", form)
        yield f"expert_hidden({kind}, biases)", clamped
        bias = torch.empty(n_experts, 96)
        yield (
            f"expert_sum({kind}, bias)",
            partial(expert_sum, down, n_experts, hidden, ids, weights, bias=bias),
        )
    if up.is_packed:
        yield from grouped_cases(kind, up, down, n_experts)


def grouped_cases(kind: str, up: WeightPlanes, down: WeightPlanes, n_experts: int) -> Iterator[Case]:
    k = 2
    for n_tokens in (8, 12, 200):  # small and large blocks of slots
        ids = torch.zeros(n_tokens, k, dtype=torch.int32)
        found, function = groups(ids, n_experts), "clamped_swiglu" if kind == "MXFP4" else "silu"
        biases = (torch.empty(n_experts, 64), torch.empty(n_experts, 64)) if kind == "MXFP4" else None
        x, hidden = (Rows.empty(HALVES, n, COLUMNS, "cpu") for n in (n_tokens, n_tokens * k))
        name = f"({kind}, blocks of {found.size})"
        yield (
            f"grouped_hidden{name}",
            partial(grouped_hidden, up, up, n_experts, x, k, found, biases, function),
        )
        bias = torch.empty(n_experts, 96) if kind == "MXFP4" else None
        weights = torch.empty(n_tokens, k)
        yield f"grouped_down{name}", partial(grouped_down, down, n_experts, hidden, weights, found, bias)


def route_cases() -> Iterator[Case]:
    logits, n_used = torch.empty(3, 128), torch.zeros(3, dtype=torch.int32)
    for score in (SOFTMAX, SIGMOID):
        bias = torch.empty(128) if score == SIGMOID else None
        yield f"route({score})", partial(route, Route(8, score), logits, n_used, bias)
        for normalizes in (True, False):
            ids = torch.zeros(3, 8, dtype=torch.int32)
            op = RouteWeights(score, normalizes)
            yield (
                f"route_and_weigh({score}, {normalizes})",
                partial(route_and_weigh, Route(8, score), op, logits, n_used, bias),
            )
            yield f"route_weights({score}, {normalizes})", partial(route_weights, op, logits, ids)


def recurrent_cases() -> Iterator[Case]:
    spans, weight = torch.zeros(3, 9, dtype=torch.int32), torch.empty(COLUMNS, 4)
    conv_states, conv_rings = torch.empty(2, 3, COLUMNS), torch.empty(2, 16, COLUMNS)
    for n_rows in (3, 99):
        x = torch.empty(n_rows, COLUMNS)
        yield f"causal_conv({n_rows} rows)", partial(causal_conv, x, weight, conv_states, conv_rings, spans)
    heads, keys, dim = 4, 2, 128
    mixed, both = torch.empty(3, (heads + 2 * keys) * dim), torch.empty(3, keys, 4)
    rings, vector = torch.empty(2, 16, heads, 2 * dim + 2), torch.empty(heads)
    gates = Gates(both[:, :, :2], both[:, :, 2:], vector, vector)
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.empty(2, heads, dim, dim, dtype=dtype)
        launch = partial(
            delta_net, mixed, gates, states, rings, spans, eps=1e-6, is_cyclic=dtype == torch.bfloat16
        )
        yield f"delta_net({dtype})", launch
    many, each = torch.empty(100, (heads + 2 * keys) * dim), torch.empty(100, keys, 4)
    prompt = Gates(each[:, :, :2], each[:, :, 2:], vector, vector)
    states = torch.empty(2, heads, dim, dim)
    launch = partial(delta_net, many, prompt, states, rings, spans, eps=1e-6, is_cyclic=False)
    yield "delta_net(a prompt)", launch
    out, by_head = Rows.empty(INT8, 3, heads * dim, "cpu"), torch.empty(3, heads, dim)
    yield "gated_norm", partial(gated_norm, by_head, by_head, torch.empty(dim), 1e-6, out)


def router_cases() -> Iterator[Case]:
    x, router, factors = torch.empty(3, COLUMNS), torch.empty(8, COLUMNS), torch.empty(COLUMNS)
    yield "norm_and_logits", partial(norm_and_logits, x, router, factors, 1e-6)
    added = torch.empty(3, COLUMNS), torch.empty(3, COLUMNS)
    yield "norm_and_logits(a sum)", partial(norm_and_logits, x, router, factors, 1e-6, added=added)
    yield "norm_and_logits(gate)", partial(norm_and_logits, x, router, factors, 1e-6, gate=factors)
    yield "norm_and_logits(bias)", partial(norm_and_logits, x, router, bias=torch.empty(8))
    parts, ids = torch.empty(6, COLUMNS), torch.zeros(3, 2, dtype=torch.int32)
    yield "local_ids", partial(local_ids, ids, 1, 5)
    yield "slot_sums", partial(slot_sums, parts, ids, 4)
    yield "slot_sums(residual)", partial(slot_sums, parts, ids, 4, x)
    yield "slot_sums(shared)", partial(slot_sums, parts, ids, 4, x, (x, torch.empty(3, 1)))


def cases(caches: list[tuple[str, str, int]], weights: list[str]) -> Iterator[Case]:
    for cache in caches:
        yield from attention_cases(*cache)
    yield from piece_cases()
    yield from combine_cases()
    yield from message_cases()
    yield from repacking_cases()
    yield from sampling_cases()
    for form in (INT8, HALVES, PLAIN):
        yield from row_cases(form)
    for kind in weights:
        yield from product_cases(kind)
    yield from route_cases()
    yield from router_cases()
    yield from recurrent_cases()
    for kind in (*weights, "F16"):
        yield from expert_cases(kind)


def jit_functions() -> set[str]:
    """Every function of the kernels' package that Triton compiles, launched or called by another."""
    modules = [import_module(m.name) for m in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")]
    return {
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.module == module.__name__
    }


def root(error: BaseException) -> BaseException:
    """Triton names a kernel's line, and as its cause the line of a helper that the kernel calls."""
    return root(error.__cause__) if error.__cause__ else error


def main() -> int:
    forgotten, failed = jit_functions() - INTERPRETED_ONLY, []

    def note(*, src: Any, metadata_group: dict[str, str], **_: object) -> None:
        """Helpers are functions of their own in what Triton starts from."""
        code = Path(metadata_group[f"{src.name}.source"]).read_text()
        forgotten.discard(f"{src.fn.module}.{src.name}")
        forgotten.difference_update([name for name in forgotten if f"{name}__" in code])

    knobs.compilation.listener = note
    for capability, caches, weights in TARGETS:
        driver.set_active(NoGpu(capability))
        for name, launch in cases(caches, weights):
            title = f"{name} for sm_{capability}"
            print(title, flush=True)  # the last one is to blame, if the compiler takes the process down
            try:
                launch()
            except Exception as error:
                failed.append(title)
                print(f"{title} fails: {root(error)}"[:1500], file=sys.stderr)
    if failed:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
    elif forgotten:
        print("never compiled:", *sorted(forgotten), sep="\n  ", file=sys.stderr)
    return 1 if failed or forgotten else 0


if __name__ == "__main__":
    sys.exit(main())
