"""Check, then time, the CUDA backend's kernels at Llama-3-8B's shapes, over candidate launch shapes.

    python benchmarks/cuda_kernels.py [--out FILE.json] [--only matvec,matmul,attention,bundles,small]

Each kernel is first compared with a float32 reference on random data; a time is the median of graph replays that
rotate among enough copies of the data to miss the L2 cache. GB/s counts the bytes of packed weights or cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import torch
import triton

from motley.backends.cuda.kernels import bundles
from motley.backends.cuda.kernels import matmul as mm
from motley.backends.cuda.kernels import matvec as mv
from motley.backends.cuda.kernels.attention import Shares, Tables, Tuning, attend, tuning_of
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.gate import gated
from motley.backends.cuda.kernels.norm import rms_norm
from motley.backends.cuda.kernels.rope_and_store import RopeTable, rope_and_store
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows, convert
from motley.backends.cuda.kernels.seen_rows import seen_of_chains
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.kernels.unpack import unpack_by_value
from motley.backends.cuda.planes import WeightPlanes
from motley.formats.grids import IQ4_GRID

GPU = "cuda"
SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128256, 4096))
KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4")
HEADS, KV_HEADS, DIM = 32, 8, 128
Result = dict[str, Any]


def random_planes(kind: str, n_rows: int, n_columns: int) -> WeightPlanes:
    """Random weight planes: random bits as codes, and small scales."""
    blocks = n_columns // 32

    def words(per_block: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (n_rows, per_block * blocks), dtype=torch.int32, device=GPU)

    halves = 2 if kind in ("Q4_K", "Q6_K") else 1
    scale = (torch.rand(n_rows, blocks * halves, device=GPU) * 0.01 + 0.001).half()
    return WeightPlanes(
        kind,
        n_columns,
        words(8 if kind == "Q8_0" else 4),
        scale if halves == 1 else scale.view(torch.int32),
        words(2) if kind == "Q6_K" else None,
    )


def reference_values(w: WeightPlanes) -> torch.Tensor:
    """The weights as float32 (rows, columns), computed only from the table in planes.py."""
    assert w.scale is not None
    n, blocks = w.n_rows, w.n_columns // 32
    words = w.codes.view(n, -1, blocks).mT.contiguous().view(torch.uint8)  # (rows, blocks, bytes)
    if w.kind == "Q8_0":
        return (words.view(torch.int8).float() * w.scale.float()[..., None]).flatten(1)
    if w.kind == "IQ4":
        nibbles = torch.stack([words & 15, words >> 4], -1).view(n, blocks, 4, 2, 4)  # word, half, value
        levels = IQ4_GRID.levels(nibbles.transpose(2, 3).flatten(2))
        return (levels * w.scale.float()[..., None]).flatten(1)
    codes = torch.cat([words & 15, words >> 4], -1).float()  # (rows, blocks, 32)
    if w.kind == "Q4_0":
        return ((codes - 8) * w.scale.float()[..., None]).flatten(1)
    pair = w.scale.view(torch.float16).view(n, blocks, 2).float()
    if w.kind == "Q4_K":
        return (codes * pair[..., :1] - pair[..., 1:]).flatten(1)
    assert w.high is not None
    high = w.high.view(n, 2, blocks).mT.contiguous().view(torch.uint8).view(n, blocks, 2, 1, 4)
    shifts = torch.arange(0, 8, 2, device=GPU, dtype=torch.uint8).view(4, 1)
    codes += ((high >> shifts) & 3).float().flatten(2) * 16
    return ((codes - 32) * pair.repeat_interleave(16, -1)).flatten(1)


def replay_us(launch: Callable[[int], object], n_copies: int) -> float:
    """Microseconds of one launch; `launch(i)` uses copy i."""
    for i in range(n_copies):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n_copies):
            launch(i)
    ms: float = triton.testing.do_bench(graph.replay, warmup=10, rep=30, return_mode="median")
    return ms * 1e3 / n_copies


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def read_bandwidth() -> float:
    """GB/s of a sum over 4 GB."""
    x = torch.empty(2**30, dtype=torch.float32, device=GPU).fill_(1.0)
    ms = triton.testing.do_bench(lambda: x.sum(), warmup=20, rep=100, return_mode="median")
    return float(x.numel() * 4 / ms / 1e6)


def matvec_tiles(n_columns: int) -> list[mv.Tile]:
    if n_columns == 4096:
        return [mv.Tile(*t) for t in ((2, 128, 1), (4, 128, 1), (8, 128, 1), (2, 128, 2), (4, 128, 2))]
    return [
        mv.Tile(*t)
        for t in ((1, 128, 1), (2, 128, 1), (1, 256, 2), (2, 256, 2), (1, 512, 4), (2, 512, 4), (4, 512, 4))
    ]


def matmul_tiles() -> list[mm.Tile]:
    return [
        mm.Tile(*t)
        for t in (
            (64, 32, 4, 3),
            (64, 16, 4, 3),
            (64, 16, 4, 4),
            (128, 32, 8, 3),
            (128, 16, 8, 3),
            (32, 32, 4, 3),
        )
    ]


def attention_tunings() -> list[Tuning]:
    choices = itertools.product((512, 792, 924), (None,), (3, 4))
    return [Tuning(*choice) for choice in choices]


def bundle_tunings() -> list[bundles.Tuning]:
    """For several rows of a sequence: queries of a program, programs, registers."""
    shapes = ((16, 396, 168), (16, 528, 128), (32, 396, 168), (32, 264, None), (64, 264, None))
    return [bundles.Tuning(*shape) for shape in shapes]


BLOCK_SIZE = 32
BUNDLES = (2, 4, 8, 16, 64)  # rows
PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"))


def compile_case(case: tuple[Any, ...]) -> str | None:
    """Run one kernel on small data, so that its binary is in Triton's cache on disk. Returns the error, if any."""
    torch.cuda.set_device(0)
    try:
        match case:
            case ("matvec", kind, n_columns, tile):
                x = convert(torch.randn(1, n_columns, device=GPU), Rows.empty(INT8, 1, n_columns, GPU))
                mv.matvec(random_planes(kind, 64, n_columns), x, torch.empty(1, 64, device=GPU), tile=tile)
            case ("matmul", kind, n_columns, n_tokens, tile):
                x = convert(
                    torch.randn(n_tokens, n_columns, device=GPU), Rows.empty(HALVES, n_tokens, n_columns, GPU)
                )
                mm.matmul(
                    random_planes(kind, 64, n_columns), x, torch.empty(n_tokens, 64, device=GPU), tile=tile
                )
            case ("attention", kinds, tuning):
                run_attention(kinds, 1024, tuning, 1)
            case ("bundles", kinds, n_rows, tuning):
                run_attention(kinds, 1024, tuning, 1, n_rows=n_rows)
        torch.cuda.synchronize()
    except Exception as problem:  # a launch shape that this GPU does not support
        return f"{case}: {problem!r}"[:200]
    return None


def many(kind: str, n: int, k: int, n_bytes: float) -> list[WeightPlanes]:
    """Enough different matrices of one shape to fill `n_bytes`."""
    one = random_planes(kind, n, k)
    return [one] + [random_planes(kind, n, k) for _ in range(min(40, int(n_bytes / one.n_bytes)))]


def matvec_case(kind: str, n: int, k: int) -> Result:
    copies = many(kind, n, k, 300e6)
    x = convert(torch.randn(1, k, device=GPU), Rows.empty(INT8, 1, k, GPU))
    out = torch.full((1, n), torch.nan, device=GPU)

    def time_of(tile: mv.Tile) -> float:
        return replay_us(lambda i: mv.matvec(copies[i], x, out, tile=tile), len(copies))

    timed = [(time_of(tile), tile) for tile in matvec_tiles(k)]
    us, tile = min(timed, key=lambda entry: entry[0])
    mv.matvec(copies[0], x, out.fill_(torch.nan), tile=tile)
    wrong = error(out[:, :4096], x.unpack() @ reference_values(copies[0].rows(0, 4096)).T)
    gbps = copies[0].n_bytes / us / 1e3
    all_us = {f"{t.rows}/{t.blocks}/{t.warps}": round(u, 1) for u, t in timed}
    print(f"matvec {kind} {n}x{k}: {us:6.1f} us {gbps:5.0f} GB/s err {wrong:.1e} {all_us}", flush=True)
    return {"kernel": "matvec", "kind": kind, "n": n, "k": k, "us": us, "gbps": gbps} | {
        "tile": asdict(tile),
        "error": wrong,
        "all": all_us,
    }


def bench_matvec() -> list[Result]:
    return [matvec_case(kind, n, k) for (n, k), kind in itertools.product(SHAPES, KINDS)]


def matmul_case(kind: str, n: int, k: int, m: int) -> Result:
    copies = many(kind, n, k, 200e6)
    x = convert(torch.randn(m, k, device=GPU), Rows.empty(HALVES, m, k, GPU))
    out = torch.full((m, n), torch.nan, device=GPU)

    def time_of(tile: mm.Tile) -> float:
        try:
            return replay_us(lambda i: mm.matmul(copies[i], x, out, tile=tile), len(copies))
        except triton.runtime.errors.OutOfResources:
            return float("inf")

    timed = [(time_of(tile), tile) for tile in matmul_tiles()]
    us, tile = min(timed, key=lambda entry: entry[0])
    mm.matmul(copies[0], x, out.fill_(torch.nan), tile=tile)
    wrong = error(out[:, :4096], x.unpack() @ reference_values(copies[0].rows(0, 4096)).T)
    dense = torch.empty(n, k, dtype=torch.float16, device=GPU)
    unpack_us = replay_us(lambda i: unpack_by_value(copies[i], dense), len(copies))
    library_us = replay_us(lambda _: torch.mm(x.values, dense.T), 2)
    gbps = copies[0].n_bytes / us / 1e3
    all_us = {f"{t.rows}/{t.blocks}/{t.warps}/{t.stages}": round(u, 1) for u, t in timed}
    print(
        f"matmul {kind} m={m} {n}x{k}: {us:6.1f} us {gbps:5.0f} GB/s err {wrong:.1e} "
        f"unpack {unpack_us:.1f} library {library_us:.1f} {all_us}",
        flush=True,
    )
    return {"kernel": "matmul", "kind": kind, "n": n, "k": k, "m": m, "us": us, "gbps": gbps} | {
        "tile": asdict(tile),
        "error": wrong,
        "all": all_us,
        "unpack_us": unpack_us,
        "library_us": library_us,
    }


def bench_matmul() -> list[Result]:
    sizes = itertools.product(SHAPES[:3], ("Q4_K", "Q8_0", "IQ4"), (16, 64))
    return [matmul_case(kind, n, k, m) for (n, k), kind, m in sizes]


def random_cache(kind: str, n_blocks: int, size: int) -> CachePlanes:
    shape = (n_blocks, KV_HEADS, DIM // 32, size)
    if kind == "f16":
        values = torch.randn(*shape, 32, device=GPU, dtype=torch.float16)
        return CachePlanes.of(kind, {"values": values})
    width = 32 if kind == "q8_0" else 16
    codes = torch.randint(0, 256, (*shape, width), dtype=torch.uint8, device=GPU)
    scale = (torch.rand(*shape, 1, device=GPU) * (0.01 if kind == "q8_0" else 0.1)).half()
    return CachePlanes.of(kind, {"codes": codes, "scale": scale})


def cache_values(c: CachePlanes, blocks: torch.Tensor) -> torch.Tensor:
    """The cached values as float32 (heads, context, dim)."""
    codes = c.codes[blocks]
    if c.kind == "f16":
        tiles = codes.float()
    else:
        data = codes.view(torch.uint8)
        levels = (
            data.view(torch.int8).float()
            if c.kind == "q8_0"
            else torch.cat([data & 15, data >> 4], -1).float() - 8
        )
        tiles = levels * c.scale[blocks].float()
    return tiles.permute(1, 0, 3, 2, 4).reshape(KV_HEADS, -1, DIM)


def run_attention(
    kinds: tuple[str, str],
    context: int,
    tuning: Tuning | bundles.Tuning,
    n_copies: int,
    *,
    check: bool = False,
    n_rows: int = 1,
) -> tuple[float, float, float]:
    """µs of attend, of combine, and the error. `n_rows`: at the end of the context."""
    size, n_blocks = BLOCK_SIZE, context // BLOCK_SIZE
    caches = [tuple(random_cache(kind, n_blocks, size) for kind in kinds) for _ in range(n_copies)]
    order = torch.randperm(n_blocks, device=GPU).int()
    zero = torch.zeros(1, dtype=torch.int32, device=GPU)
    seen = seen_of_chains([n_rows]).to(GPU)
    tables = Tables(order[None], zero, zero, zero + context - n_rows, n_rows, zero, zero + n_rows, seen)
    q = torch.randn(n_rows, HEADS, DIM, device=GPU)
    n_splits = tuning.n_splits(1, n_rows * HEADS // KV_HEADS, KV_HEADS)
    shares = Shares.empty(n_rows, HEADS, n_splits, DIM, GPU, 2)
    out = Rows.empty(PLAIN, n_rows, HEADS * DIM, GPU)
    rows = slice(0, KV_HEADS)

    def launch(i: int) -> None:
        if isinstance(tuning, bundles.Tuning):
            bundles.attend_bundles(q, *caches[i], rows, tables, shares, scale=0.05, tuning=tuning)
        else:
            attend(q, *caches[i], rows, tables, shares, scale=0.05, tuning=tuning)

    us = replay_us(launch, n_copies)
    combine_us = replay_us(lambda i: combine(shares, tables, size, out, rotate=True), 4)
    wrong = 0.0
    if check:
        launch(0)
        got = combine(shares, tables, size, out, rotate=False).values.view(n_rows, KV_HEADS, -1, DIM)
        k, v = (cache_values(c, order.long()) for c in caches[0])
        scores = q.view(n_rows, KV_HEADS, -1, DIM) @ k.mT * 0.05
        later = (
            torch.arange(context, device=GPU) > torch.arange(context - n_rows, context, device=GPU)[:, None]
        )
        weights = torch.softmax(scores.masked_fill(later[:, None, None], -torch.inf), -1)
        wrong = error(got, weights @ v)
    return us, combine_us, wrong


def bench_attention(
    contexts: tuple[int, ...] = (131072, 32768), pairs: tuple[tuple[str, str], ...] = PAIRS
) -> list[Result]:
    results = []
    for context, kinds in itertools.product(contexts, pairs):
        per_token = KV_HEADS * DIM * sum({"f16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}[kind] for kind in kinds)
        n_copies = max(2, int(200e6 / (per_token * context)))
        timed = [(*run_attention(kinds, context, t, n_copies)[:2], t) for t in attention_tunings()]
        us, combine_us, tuning = min(timed, key=lambda entry: entry[0] + entry[1])
        wrong = run_attention(kinds, context, tuning, 1, check=True)[2]
        gbps = per_token * context / us / 1e3
        all_us = {f"{t.n_programs}/{t.registers}/{t.stages}": (round(a, 1), round(c, 1)) for a, c, t in timed}
        results.append(
            {
                "kernel": "attention",
                "kinds": kinds,
                "context": context,
                "us": us,
                "combine_us": combine_us,
                "gbps": gbps,
            }
            | {"tuning": asdict(tuning), "error": wrong, "all": all_us}
        )
        print(
            f"attention {kinds} {context}: {us:6.1f} us {gbps:5.0f} GB/s combine {combine_us:.1f} "
            f"err {wrong:.1e} {tuning}\n    {all_us}",
            flush=True,
        )
    return results


def bench_bundles(context: int = 122880) -> list[Result]:
    """Several rows of one sequence, in µs of attend and combine, by launch shape."""
    results = []
    for kinds, n_rows in itertools.product(PAIRS[:3], BUNDLES):
        by_shape, tunings = {}, {}
        for t in bundle_tunings():
            if t.n_queries > 16 and t.n_queries >= 2 * n_rows * HEADS // KV_HEADS:
                continue
            name = f"{t.n_queries} queries, {t.n_programs} programs, {t.registers} registers"
            timed = run_attention(kinds, context, t, 2, n_rows=n_rows)[:2]
            by_shape[name], tunings[name] = [round(us, 1) for us in timed], t
        best = min(by_shape, key=lambda name: sum(by_shape[name]))
        wrong = run_attention(kinds, context, tunings[best], 1, check=True, n_rows=n_rows)[2]
        single = run_attention(kinds, context, tuning_of(*kinds), 2)[:2]
        row = {"kernel": "bundles", "kinds": kinds, "rows": n_rows, "best": best, "all": by_shape}
        results.append(row | {"single": single, "error": wrong})
        print(
            f"{n_rows} rows {kinds}: {by_shape[best]} µs ({best}), one row {single}, err {wrong:.1e}\n   {by_shape}",
            flush=True,
        )
    return results


def bench_small() -> list[Result]:
    """Times of the kernels between the matrix products, for one row."""
    x, weight = torch.randn(1, 4096, device=GPU), torch.rand(4096, device=GPU)
    int8, wide = Rows.empty(INT8, 1, 4096, GPU), Rows.empty(INT8, 1, 14336, GPU)
    both = torch.randn(1, 28672, device=GPU)
    q, k, v = torch.randn(1, HEADS + 2 * KV_HEADS, DIM, device=GPU).split([HEADS, KV_HEADS, KV_HEADS], 1)
    zero = torch.zeros(1, dtype=torch.int32, device=GPU)
    rope = RopeTable(torch.rand(DIM // 2, device=GPU), DIM, False, 1.0)
    keys, values = random_cache("q4_0", 4, 64), random_cache("q8_0", 4, 64)
    out = torch.empty(1, HEADS, DIM, device=GPU)
    cases: dict[str, Callable[[int], object]] = {
        "norm": lambda _: rms_norm(x, weight, 1e-5, int8),
        "gate": lambda _: gated(both, "silu", wide),
        "rope_and_store": lambda _: rope_and_store(
            q, k, v, zero, zero, rope, keys, values, slice(0, KV_HEADS), out, rotate_k=True, rotate_v=True
        ),
        "convert": lambda _: convert(x, int8),
    }
    results = [{"kernel": name, "us": replay_us(case, 20)} for name, case in cases.items()]
    print({r["kernel"]: round(r["us"], 2) for r in results}, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--only", default="small,matvec,matmul,attention")
    options = parser.parse_args()
    wanted = options.only.split(",")
    cases: list[tuple[Any, ...]] = [
        ("matvec", kind, k, tile) for kind in KINDS for k in (4096, 14336) for tile in matvec_tiles(k)
    ]
    cases += [
        ("matmul", kind, k, m, t)
        for kind in ("Q4_K", "Q8_0", "IQ4")
        for k in (4096, 14336)
        for m in (16, 64)
        for t in matmul_tiles()
    ]
    cases += [("attention", kinds, tuning) for kinds in PAIRS for tuning in attention_tunings()]
    cases += [("bundles", kinds, 16, t) for kinds in PAIRS[:3] for t in bundle_tunings()]
    start = time.time()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        for problem in pool.map(compile_case, [c for c in cases if c[0] in wanted]):
            if problem:
                print(problem)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    benches = {
        "small": bench_small,
        "matvec": bench_matvec,
        "matmul": bench_matmul,
        "attention": bench_attention,
        "bundles": bench_bundles,
    }
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "read_gbps": read_bandwidth(), "results": [],
    }  # fmt: skip
    print(f"read bandwidth {report['read_gbps']:.0f} GB/s")
    for name in wanted:
        report["results"] += benches[name]()
        if options.out:
            with open(options.out, "w") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
