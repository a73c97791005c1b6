"""Mixtures of experts and recurrent layers on a GPU, through `LLM` and its engine, with random weights.

    python -m benchmarks.cuda_experts --shape qwen3-30b-a3b --out FILE.json [--layers N] [--only decode,prompt,…]
    python -m benchmarks.cuda_experts --shape glm-4.5-air --depths 0 --requests 8 --layers 16
    python -m benchmarks.cuda_experts --only beside --n-cpu-moe 20

    check      the bundled experts model: logits on the GPU against the CPU's
    tiles      tiles of the grouped products, one layer by itself, in µs
    decode     one request: tokens/s by the runner, and by the engine at each depth; fewer experts
    prompt     prompts of 512 and 2,048 tokens
    batch      8 and 64 requests of 512 + 64 tokens: tokens/s of the steps in which all requests decode
    crews      two virtual devices against one, tensor mode
    beside     routed experts of --n-cpu-moe layers (default: all) on the CPU: decode, half the experts, prompts, the
               CPU's part of a layer alone and beside copies
    profile    time of each kernel in decode steps and in a prompt
    write      make the file of weights; not without being asked for

The file of weights is made once (XDG_CACHE_HOME); GLM's whole file has 77 GB. A part that fails is noted, and the
others still run.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_overlap import cpu_beside_copies
from benchmarks.reporting import Report
from benchmarks.watching import watch_steps
from motley import LLM
from motley.bench import SHAPES, Workload, measure, random_model_path, write_random_model

TILES = ((64, 32, 4, 2), (64, 32, 4, 3), (64, 16, 4, 3), (128, 32, 4, 2), (128, 32, 8, 2), (128, 16, 8, 3))
PARTS = ("check", "tiles", "decode", "prompt", "batch", "crews", "beside", "profile")
_ALL_LAYERS = 2**20


class Bench:
    """A model, and what is measured of it."""

    def __init__(self, path: Path, **options: Any) -> None:
        started = time.perf_counter()
        self.llm = LLM(path, prefix_cache=False, **options)
        self.llm.finish_compiling()
        self.loaded = {
            "load_s": round(time.perf_counter() - started, 2),
            "failures": self.llm.warm_up.failures,
        }
        self._rng = random.Random(1)
        self.steps = watch_steps(self.llm.engine)

    def speed(self, *workloads: Workload, repetitions: int = 3) -> dict[str, Any]:
        found = measure(self.llm, workloads, repetitions)
        return {m.workload.name: [round(m.rate, 1), round(m.spread, 1)] for m in found}

    def prompts(self, n: int, n_tokens: int) -> list[list[int]]:
        n_vocab = self.llm.tokenizer.n_vocab
        return [[self._rng.randrange(256, n_vocab) for _ in range(n_tokens)] for _ in range(n)]

    def serve(self, n: int, n_prompt: int, n_new: int, **sampling: Any) -> dict[str, Any]:
        """Greedy requests at once, without drafts: tokens per second in all, and of the steps in which all decode."""
        self.steps.clear()
        started = time.perf_counter()
        prompts = self.prompts(n, n_prompt)
        sampling = {"temperature": 0.0, "speculative": "off", "ignore_eos": True, **sampling}
        done = self.llm.generate(prompts, max_tokens=n_new, **sampling)
        elapsed = time.perf_counter() - started
        failed = [str(each.error) for each in done if each.error is not None]
        times = sorted(seconds for n_tokens, chosen, seconds in self.steps if n_tokens == chosen == n)
        if failed or not times:
            return {"failed": failed[:2], "n_steps": len(self.steps)}
        return {
            "decode": round(n * len(times) / sum(times), 1),
            "decode_median": round(n / times[len(times) // 2], 1),
            "slowest_ms": [round(seconds * 1e3, 2) for seconds in times[-4:]],
            "total": round(n * n_new / elapsed, 1),
        }

    def profile(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Kernels of the second half of `work`, by (name, the one before): launches, µs of one, µs added by one.

        Kernels overlap: what one adds is the time from the end of all before it to its own end.
        """
        work()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            work()
        found = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found.sort(key=lambda e: e.time_range.start)
        found = found[len(found) // 2 :]
        rows: dict[tuple[str, str], list[float]] = {}
        last, end = "", found[0].time_range.start if found else 0.0
        for e in found:
            row = rows.setdefault((_short(e.name), last), [0, 0.0, 0.0])
            row[0] += 1
            row[1] += e.time_range.end - e.time_range.start
            row[2] += max(0.0, e.time_range.end - end)
            end, last = max(end, e.time_range.end), _short(e.name)
        kernels = [
            (f"{name} after {before}", n, round(own / n, 2), round(added / n, 2))
            for (name, before), (n, own, added) in sorted(rows.items(), key=lambda item: -item[1][2])[:40]
        ]
        return {"ms": round(sum(row[2] for row in rows.values()) / 1e3, 2), "kernels": kernels}


def _short(name: str) -> str:
    """A kernel's name; of torch's the last words, which say what they do."""
    return name if len(name) < 40 else f"{name[:10]}…{name[-40:]}"


def check(device: str) -> dict[str, float]:
    """Relative error of logits of the bundled experts model against the CPU's: one pass, then one by one."""
    import motley

    path = Path(motley.__file__).parent / "bundled" / "motley-experts-9m-q8_0.gguf"
    tokens = list(range(40, 100))
    results = []
    for each in ("cpu", device):
        with LLM(path, devices=each, n_ctx=256, n_parallel=4, cache_type_k="f32", cache_type_v="f32") as llm:
            whole = llm.logits(tokens)
            with llm.raw_sequence() as sequence:
                single = [sequence.feed([token], n_outputs=1).flatten() for token in tokens[:12]]
            results.append((torch.as_tensor(whole).float().cpu(), torch.stack(single).float().cpu()))
    (a, b), (c, d) = results
    return {
        "one pass": float((a - c).norm() / a.norm()),
        "one by one": float((b - d).norm() / b.norm()),
        "same top, one pass": float((a.argmax(-1) == c.argmax(-1)).float().mean()),
        "same top, one by one": float((b.argmax(-1) == d.argmax(-1)).float().mean()),
    }


def tiles(n_experts: int = 128, k: int = 8, n_embd: int = 2048, n_ff: int = 768) -> dict[str, Any]:
    """µs of the two grouped products for several tiles, by tokens and slots of a block."""
    from motley.backends.cuda.kernels import grouped_experts as grouped
    from motley.backends.cuda.kernels.rows import HALVES, Rows, convert
    from motley.backends.cuda.planes import to_planes
    from motley.formats import PackedTensor, get_format

    device, form = torch.device("cuda:0"), get_format("Q4_K")

    def planes(rows: int, columns: int) -> Any:
        some = form.pack(torch.randn(64, columns) * columns**-0.5).to(device)
        return to_planes(PackedTensor(some.repeat(rows // 64, 1), form))

    def halves(rows: int, columns: int) -> Rows:
        return convert(torch.randn(rows, columns, device=device), Rows.empty(HALVES, rows, columns, device))

    gate, up, down = (planes(n_experts * r, c) for r, c in ((n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff)))
    results: dict[str, Any] = {}

    def sweep(n_tokens: int, size: int) -> None:
        ids = torch.randn(n_tokens, n_experts, device=device).topk(k, 1).indices.int().contiguous()
        weights, x, h = (
            torch.rand(n_tokens, k, device=device),
            halves(n_tokens, n_embd),
            halves(n_tokens * k, n_ff),
        )
        found = grouped.groups(ids, n_experts, size)
        results[f"{n_tokens}/{size}: groups"] = _time(lambda: grouped.groups(ids, n_experts, size))

        def both(tile: grouped.Tile) -> Any:
            try:
                hidden = partial(grouped.grouped_hidden, gate, up, n_experts, x, k, found, tile=tile)
                return [
                    _time(hidden),
                    _time(partial(grouped.grouped_down, down, n_experts, h, weights, found, tile=tile)),
                ]
            except Exception as error:
                return type(error).__name__

        for rows, blocks, warps, stages in TILES:
            name = f"{n_tokens}/{size}: {rows}x{blocks} w{warps} s{stages}"
            results[name] = both(grouped.Tile(rows, blocks, warps, stages))
            print(name, results[name], flush=True)

    for n_tokens, sizes in ((64, (16,)), (512, (16, 32, 64)), (2048, (64, 128))):
        for size in sizes:
            sweep(n_tokens, size)
    return results


def _time(work: Callable[[], Any], n: int = 10) -> float:
    """µs, the median of `n`."""
    times = []
    for i in range(n + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        if i > 1:
            times.append(begin.elapsed_time(end) * 1e3)
    return round(sorted(times)[n // 2], 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--weights", default="Q4_K")
    parser.add_argument("--cache", default="q8_0")
    parser.add_argument("--depths", default="0,32768")
    parser.add_argument("--requests", default="8,64")
    parser.add_argument("--n-cpu-moe", type=int, default=_ALL_LAYERS)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report, parts = Report(args.out), args.only.split(",")
    if unknown := sorted(set(parts) - {*PARTS, "write"}):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}, write")
    if "check" in parts:
        report.add("check", lambda: check(args.device))
    if "tiles" in parts:
        report.add("tiles", tiles)
    if not {"decode", "prompt", "batch", "crews", "beside", "profile", "write"} & set(parts):
        return
    path = random_model_path(args.shape, args.weights, args.layers)
    report.add("model", lambda: f"{args.shape}, {args.layers or SHAPES[args.shape].n_layers} layers")
    if not path.exists():
        report.add("write", lambda: _write(path, args.shape, args.weights, args.layers))
    depths, sizes = ([int(n) for n in text.split(",")] for text in (args.depths, args.requests))
    kv = {"cache_type_k": args.cache, "cache_type_v": args.cache}
    if {"decode", "prompt", "batch", "profile"} & set(parts):
        n_ctx = max(*depths, *(576 for _ in sizes)) + 2304
        tokens = max(n_ctx, 640 * max(sizes))
        bench = Bench(
            path,
            devices=args.device,
            n_ctx=n_ctx,
            n_batch=2048,
            n_parallel=max(sizes),
            kv_cache_tokens=tokens,
            **kv,
        )
        report.add("load", lambda: bench.loaded)
        _measure(report, bench, parts, depths, sizes)
        bench.llm.close()
        torch.cuda.empty_cache()
    if "crews" in parts:
        for devices in (args.device, f"{args.device},{args.device}"):
            report.add(f"crew {devices}", lambda devices=devices: _crew(path, devices, kv))
    if "beside" in parts:
        report.add("experts on the CPU", lambda: _beside(path, args.device, args.n_cpu_moe, kv))


def _write(path: Path, shape: str, weights: str, n_layers: int | None) -> dict[str, float]:
    started = time.perf_counter()
    write_random_model(path, shape, weights, n_layers=n_layers)
    seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 1), "gigabytes": round(path.stat().st_size / 1e9, 2)}


def _measure(report: Report, bench: Bench, parts: list[str], depths: list[int], sizes: list[int]) -> None:
    if "decode" in parts:
        report.add("decode", lambda: bench.speed(Workload(64, False)))
        report.add("engine, 1 request", lambda: [bench.serve(1, 16, 128) for _ in range(3)])
        for depth in filter(None, depths):
            report.add(f"engine, 1 request @ {depth}", lambda depth=depth: bench.serve(1, depth, 64))
        half = max(1, bench.llm.n_expert_used // 2)
        report.add(
            "engine, half the experts",
            lambda: [bench.serve(1, 16, 128, n_expert_used=half) for _ in range(2)],
        )
    if "prompt" in parts:
        report.add("prompt", lambda: bench.speed(Workload(512, True), Workload(2048, True), repetitions=4))
    if "batch" in parts:
        for n in sizes:
            report.add(f"{n} requests", lambda n=n: [bench.serve(n, 512, 64) for _ in range(3)])
    if "profile" in parts:
        one = partial(measure, bench.llm, [Workload(12, False)], 1)
        report.add("profile decode", partial(bench.profile, one))
        for n in sizes:
            report.add(f"profile {n} requests", partial(bench.profile, partial(bench.serve, n, 64, 16)))
        for n in (512, 2048):
            prompt = partial(measure, bench.llm, [Workload(n, True)], 3)
            report.add(f"profile prompt of {n}", partial(bench.profile, prompt))


def _crew(path: Path, devices: str, kv: dict[str, str]) -> dict[str, Any]:
    mode = {"split_mode": "tensor"} if "," in devices else {}
    bench = Bench(
        path, devices=devices, n_ctx=1024, n_batch=512, n_parallel=8, kv_cache_tokens=8192, **kv, **mode
    )
    try:
        runs = {n: [bench.serve(n, 64, 128) for _ in range(3)][1:] for n in (1, 8)}
        return bench.loaded | {f"{n} requests": found for n, found in runs.items()}
    finally:
        bench.llm.close()
        torch.cuda.empty_cache()


def _beside(path: Path, device: str, n_cpu_moe: int, kv: dict[str, str]) -> dict[str, Any]:
    """Routed experts of `n_cpu_moe` layers on the CPU. One request with all and with half of its experts, in turn."""
    bench = Bench(
        path, devices=f"{device},cpu", n_cpu_moe=n_cpu_moe, n_ctx=2048, n_batch=512, n_parallel=1, **kv
    )
    try:
        half = max(1, bench.llm.n_expert_used // 2)
        rounds = [(bench.serve(1, 16, 64), bench.serve(1, 16, 64, n_expert_used=half)) for _ in range(4)][1:]
        pairs = [(own["decode"], fewer["decode"]) for own, fewer in rounds]
        prompts = bench.speed(*(Workload(n, True) for n in (32, 64, 128, 512)), repetitions=4)
        return bench.loaded | {
            "details": bench.llm.details,
            "engine, 1 request": [own for own, _ in rounds],
            "engine, half the experts": [fewer for _, fewer in rounds],
            "half / all": [round(fewer / own, 3) for own, fewer in pairs],
            "prompt": prompts,
            "one layer's experts": cpu_beside_copies(bench.llm, 512),
        }
    finally:
        bench.llm.close()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
