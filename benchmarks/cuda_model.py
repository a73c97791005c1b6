"""Llama-3-8B's shapes on one GPU, with random weights: the complete table of tokens per second, in one call.

    python benchmarks/cuda_model.py [--out FILE.json] [--layers 32] [--only steps,engine] [--cases "depth 32768"]

First a small model's logits are compared with the reference backend's, through prefill and captured decode steps.

`steps`: the ordinary llama graph, run by the cuda backend; only the file, the tokenizer and the engine's bookkeeping
are left out. A step's time (`ms`) is the median of graph replays; `run_ms` is the median wall time of a whole run with
the copy of ids and block tables, until the GPU is done. Depth is the number of cached tokens; percent are of the time
that reading the packed weights (in this backend's planes) and the cache would take at the measured read bandwidth.

`engine`: requests through `Engine`, one device against two virtual ones: see cuda_engine.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import triton
from cuda_engine import bench_engine
from cuda_kernels import PAIRS, bench_attention, random_planes, read_bandwidth

from motley.backends import Backend, Executable, Joint, LoadedWeight, ReferenceBackend, join
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.capture import Captured
from motley.backends.cuda.kernels import attention
from motley.backends.cuda.weights import DeviceMatrix, PlaneRef
from motley.bench.shapes import SHAPES, Shape
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.gguf.metadata import Metadata
from motley.gguf.tensors import TensorInfo
from motley.graph import CACHE, Graph
from motley.graph.ops import cache_layer
from motley.kvcache.arena import ArenaLayer, GroupBatch, SequenceTable
from motley.kvcache.store import Store
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.plan import DevicePlan

GPU = torch.device("cuda:0")
PROFILE = "--profile" in sys.argv  # print the kernels of a prefill
SIZE = 32  # tokens of a cache block
SHAPE = SHAPES["llama-8b"]


def describe(shape: Shape, tensors: Mapping[str, tuple[tuple[int, ...], str]], n_layers: int) -> ModelSpec:
    """A model spec of a llama model without a file."""
    numbers: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": n_layers,
        "llama.embedding_length": shape.n_embd,
        "llama.attention.head_count": shape.n_heads,
        "llama.attention.head_count_kv": shape.n_kv_heads,
        "llama.feed_forward_length": shape.n_ff,
        "llama.context_length": shape.n_ctx,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
    }
    infos = {name: TensorInfo(name, size, kind, 0, 0, 0) for name, (size, kind) in tensors.items()}
    return ModelSpec(Path("random"), Metadata(numbers, Path("random")), infos, ())


class Model:
    """The graph's weights on the GPU, and a spec that describes them without a file."""

    def __init__(self, matrices: str, output: str, n_layers: int) -> None:
        kinds = {name: matrices for name, _, _ in SHAPE.matrices()} | {"output": output}
        shapes = {f"{name}.weight": (rows, columns) for name, rows, columns in SHAPE.matrices()}
        shapes = {
            n: s for n, s in shapes.items() if not n.startswith("blk.") or int(n.split(".")[1]) < n_layers
        }
        self.weights: dict[str, LoadedWeight] = {}
        tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, (rows, columns) in shapes.items():
            form = get_format(kinds[name.removesuffix(".weight")])
            planes = random_planes(form.name, rows, columns)
            if planes.scale is not None:
                # Values of about columns^-0.5, so that activations have an ordinary size; Q4_K: minimum = 7.5 scale.
                pair = planes.scale.view(torch.float16)
                pair.fill_(columns**-0.5 / {"Q8_0": 64, "Q4_0": 4, "Q4_K": 4, "Q6_K": 16}[form.name])
                if form.name == "Q4_K":
                    pair[:, 1::2] *= 7.5
            self.weights[name] = DeviceMatrix(PlaneRef(planes))
            tensors[name] = (rows, columns), form.name
        norms = ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(n_layers) for n in ("attn", "ffn"))]
        for name in (f"{norm}.weight" for norm in norms):
            self.weights[name] = PackedTensor.pack(torch.ones(SHAPE.n_embd, device=GPU), get_format("F32"))
            tensors[name] = (SHAPE.n_embd,), "F32"
        self.spec = describe(SHAPE, tensors, n_layers)
        self.n_layers = n_layers
        self.backend = CudaBackend("cuda:0")

    @property
    def n_bytes(self) -> int:
        """Bytes read for each token: all matrices except the embedding."""
        return sum(w.nbytes for name, w in self.weights.items() if name != "token_embd.weight")


class Cache:
    """Cache stores of all layers; blocks are allocated in a shuffled order and hold random data."""

    def __init__(self, kind: str, n_tokens: int, shape: Shape, n_layers: int, device: torch.device) -> None:
        self.kind = get_cache_type(kind)
        self.n_blocks = -(-n_tokens // SIZE)
        self.n_heads = shape.n_kv_heads
        self.head_dim = shape.head_dim

        def allocate(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if dtype == torch.uint8:
                return torch.randint(0, 256, size, dtype=dtype, device=device)
            return torch.empty(size, dtype=dtype, device=device).uniform_(-0.1, 0.1)

        keys, values = (
            Store(
                self.kind,
                n_blocks=self.n_blocks,
                block_size=SIZE,
                n_rows=n_layers * self.n_heads,
                head_dim=self.head_dim,
                allocate=allocate,
            )
            for _ in range(2)
        )
        self.keys, self.values = keys, values
        self.order = torch.randperm(self.n_blocks, generator=torch.Generator().manual_seed(2))

    def batch(self, depths: list[int], n_new: int) -> GroupBatch:
        """A batch of sequences with `depths` cached tokens and `n_new` new tokens each."""
        tables, row, block = [], 0, 0
        for depth in depths:
            n_blocks = -(-(depth + n_new) // SIZE)
            blocks = self.order[block : block + n_blocks].numpy().astype(np.int32)
            tables.append(SequenceTable(row, n_new, depth, 0, blocks))
            row, block = row + n_new, block + n_blocks
        return GroupBatch.of(tables, SIZE)

    def layer(self, number: int) -> ArenaLayer:
        rows = slice(number * self.n_heads, (number + 1) * self.n_heads)
        return ArenaLayer(self.keys, self.values, rows, 0)


def prepare(
    spec: ModelSpec, backend: Backend, weights: Mapping[str, LoadedWeight], cache: Cache, shape: BatchShape
) -> tuple[Graph, Joint]:
    rotation = cache.head_dim if cache.kind.is_quantized else 0
    graph = build_graph(spec, read_params(spec), shape, GraphOptions(SHAPE.n_ctx, 1, rotation, rotation))
    executable = backend.prepare(DevicePlan.of(graph, backend.kernels), weights)
    return graph, join([executable]) or _Alone(executable)


class _Alone:
    """An executable of a backend that cannot join executables, with the joined interface."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable

    def run(self, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, ...]]:
        return [self._executable.run(inputs[0])]


def inputs_of(graph: Graph, cache: Cache, batch: GroupBatch, tokens: torch.Tensor) -> list[dict[str, Any]]:
    """The graph's inputs, with the logits of each sequence's last row as outputs."""
    positions = [torch.arange(t.position, t.position + t.n_rows) for t in batch.tables]
    inputs: dict[str, Any] = {
        "tokens": tokens,
        "positions": torch.cat(positions).int(),
        "output_rows": torch.tensor([t.first_row + t.n_rows - 1 for t in batch.tables], dtype=torch.int32),
    }
    caches = [node for node in graph.inputs if node.dtype == CACHE]
    return [inputs | {node.name: cache.layer(cache_layer(node)).on(batch) for node in caches}]


def graph_of(joint: Joint) -> Captured:
    """The graph of the one decode batch that was run."""
    (decodes,) = joint._decodes.values()  # type: ignore[attr-defined]
    assert decodes.captured is not None, "the step was not captured"
    return cast(Captured, decodes.captured)


def step_ms(model: Model, cache: Cache, depths: list[int], n_new: int) -> tuple[float, float]:
    """Milliseconds of a pass over `n_new` tokens of each sequence: GPU time, and wall time of a whole run."""
    n_tokens = len(depths) * n_new
    graph, joint = prepare(model.spec, model.backend, model.weights, cache, BatchShape(n_tokens, len(depths)))
    tokens = torch.randint(0, SHAPE.n_vocab, (n_tokens,), dtype=torch.int32)
    inputs = inputs_of(graph, cache, cache.batch(depths, n_new), tokens)
    for _ in range(3):
        ((logits,),) = joint.run(inputs)
    if not bool(logits.isfinite().all()):
        raise ArithmeticError("logits are not finite")
    work = graph_of(joint).replay if n_new == 1 else lambda: joint.run(inputs)
    if PROFILE and n_new > 1:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))
    ms: float = triton.testing.do_bench(work, warmup=20, rep=120, return_mode="median")
    walls = []
    for _ in range(20):
        start = time.perf_counter()
        joint.run(inputs)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    return ms, sorted(walls)[10] * 1e3


def check(matrices: str, kind: str, n_prompt: int = 150, n_steps: int = 4) -> float:
    """The largest error of a small model's logits over a prompt and some decode steps, reference against cuda."""
    shape = SHAPES["llama-160m"]
    generator = torch.Generator().manual_seed(1)
    packed: dict[str, PackedTensor] = {}
    for name, rows, columns in shape.matrices():
        if not name.startswith("blk.") or int(name.split(".")[1]) < 2:
            rows = min(rows, 2048)  # keeps the vocabulary small
            values = torch.randn(rows, columns, generator=generator) * columns**-0.5
            packed[f"{name}.weight"] = PackedTensor.pack(values, get_format(matrices))
    for norm in ("output_norm", *(f"blk.{i}.{n}_norm" for i in range(2) for n in ("attn", "ffn"))):
        packed[f"{norm}.weight"] = PackedTensor.pack(torch.ones(shape.n_embd), get_format("F32"))
    spec = describe(shape, {n: (w.shape, w.format.name) for n, w in packed.items()}, 2)
    tokens = torch.randint(0, 2048, (n_prompt + n_steps,), generator=generator, dtype=torch.int32)
    results = []
    for backend, device in ((ReferenceBackend(), torch.device("cpu")), (CudaBackend(str(GPU)), GPU)):
        weights = {name: backend.load(weight) for name, weight in packed.items()}
        cache = Cache(kind, n_prompt + n_steps + SIZE, shape, 2, device)
        executables: dict[int, tuple[Any, Any]] = {}
        logits, start = [], 0
        for n_new in (n_prompt, *[1] * n_steps):
            if n_new not in executables:
                executables[n_new] = prepare(spec, backend, weights, cache, BatchShape(n_new, 1))
            graph, executable = executables[n_new]
            batch = cache.batch([start], n_new)
            inputs = inputs_of(graph, cache, batch, tokens[start : start + n_new])
            logits.append(executable.run(inputs)[0][0].cpu().clone())
            start += n_new
        results.append(torch.cat(logits))
    return float(((results[1] - results[0]).norm(dim=1) / results[0].norm(dim=1)).max())


def kv_bytes(cache: Cache, depths: list[int], n_layers: int) -> int:
    return sum(depths) * n_layers * SHAPE.n_kv_heads * 2 * cache.kind.head_bytes(SHAPE.head_dim)


def measure(model: Model, case: Mapping[str, Any], n_layers: int, gbps: float) -> dict[str, Any]:
    depths, n_new = [case["depth"]] * case["batch"], case["new"]
    cache = Cache(case["cache"], sum(depths) + len(depths) * (n_new + SIZE), SHAPE, n_layers, GPU)
    ms, run_ms = step_ms(model, cache, depths, n_new)
    read = model.n_bytes + kv_bytes(cache, depths, n_layers)
    tokens = len(depths) * n_new
    return dict(case) | {
        "ms": ms,
        "run_ms": run_ms,
        "tokens_per_s": tokens / ms * 1e3,
        "gigabytes_read": read / 1e9,
        "percent_of_roofline": read / gbps / 1e4 / ms,
    }


def cases(weights: str) -> list[dict[str, Any]]:
    def case(cache: str, depth: int, batch: int = 1, new: int = 1) -> dict[str, Any]:
        return {"weights": weights, "cache": cache, "depth": depth, "batch": batch, "new": new}

    if weights != "Q4_K":
        return [case("f16", 0)]
    depths = [case(cache, depth) for depth in (8192, 32768, 122880) for cache in ("f16", "q8_0", "q4_0")]
    batches = [case(cache, 544, batch) for batch in (8, 64) for cache in ("f16", "q8_0")]
    prompts = [case(cache, depth, new=2048) for depth in (0, 32768) for cache in ("f16", "q8_0", "q4_0")]
    return [case("f16", 0), case("q4_0", 0), *depths, *batches, *prompts, case("q8_0", 0, batch=4, new=512)]


def describe_case(case: Mapping[str, Any]) -> str:
    return "{weights} {cache} depth {depth} batch {batch} new {new}".format_map(case)


def bench_steps(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Add results to `report`, and save it after each."""
    for weights, output in (("Q4_K", "Q6_K"), ("Q8_0", "Q8_0")):
        chosen = [case for case in cases(weights) if re.search(options.cases, describe_case(case))]
        if not chosen:
            continue
        model = Model(weights, output, options.layers)
        for case in chosen:
            try:
                result = measure(model, case, options.layers, report["read_gbps"])
            except Exception as problem:  # the remaining cases still run
                print(f"{case}: {problem!r}"[:400], flush=True)
                continue
            report["results"].append(result)
            print(
                f"{describe_case(case):<45} {result['ms']:8.3f} ms ({result['run_ms']:.3f} a run) "
                f"{result['tokens_per_s']:8.0f} t/s {result['percent_of_roofline']:5.1f} %",
                flush=True,
            )
            save(report, options)
        del model
        torch.cuda.empty_cache()


def check_all(report: dict[str, Any]) -> None:
    for matrices, kind in (("Q4_K", "f16"), ("Q8_0", "q8_0"), ("Q6_K", "q4_0"), ("Q4_0", "f16")):
        wrong = check(matrices, kind)
        report["checks"].append({"weights": matrices, "cache": kind, "error": wrong})
        print(f"check {matrices} {kind}: {wrong:.1e}", flush=True)
        if not wrong < 0.05:
            raise ArithmeticError(f"{matrices} with a cache of {kind} differs from the reference by {wrong}")


def save(report: Mapping[str, Any], options: argparse.Namespace) -> None:
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--tune", action="store_true", help="choose the attention kernel's tuning first")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="steps,engine")
    parser.add_argument(
        "--cases", default="", metavar="REGEX", help="only these, such as 'depth 544 batch 64'"
    )
    parser.add_argument("--layers", type=int, default=SHAPE.n_layers)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "model": "llama-8b shapes",
        "layers": options.layers,
        "read_gbps": read_bandwidth(),
        "attention": [],
        "checks": [],
        "results": [],
    }
    print(f"read bandwidth {report['read_gbps']:.0f} GB/s", flush=True)
    if options.tune:
        for result in bench_attention((131072,), PAIRS[:3]):
            attention.TUNINGS[result["kinds"][1]] = attention.Tuning(**result["tuning"])
            report["attention"].append(result)
    report["tunings"] = {kind: asdict(tuning) for kind, tuning in attention.TUNINGS.items()}
    check_all(report)
    if "steps" in options.only:
        bench_steps(report, options)
    if "engine" in options.only:
        report["engine"] = bench_engine(options.layers)
    save(report, options)


if __name__ == "__main__":
    main()
