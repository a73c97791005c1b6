"""Requests through the engine on a GPU, with Llama-3-8B's shapes: batched decode, and virtual devices against one.

    python benchmarks/cuda_engine.py [--layers 32] [--out FILE.json]

Weights are random and made in memory (matrices Q4_K, output Q6_K); everything else is as in ordinary use: tokenizer,
scheduler, paged cache, sampling. Tokens are counted as in llama.cpp's batched bench: `decode` is tokens over time
of the steps in which all requests decode (the last prompt is in, the first answer is not complete); `total` is the
answers' tokens over the whole time, prompts included. Runs of the crews alternate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from motley.backends import backend_for
from motley.bench.shapes import SHAPES
from motley.engine import Engine, Request, SamplingParams
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.gguf.metadata import Metadata
from motley.gguf.tensors import TensorInfo
from motley.kvcache.manager import CacheManager
from motley.kvcache.types import get_cache_type
from motley.models import read_params
from motley.runtime import CacheConfig, Runner, fit_cache, make_crew, split_model
from motley.text import Tokenizer

SHAPE = SHAPES["llama-8b"]
ONE: dict[str, Any] = {"devices": "cuda:0"}
TENSOR: dict[str, Any] = {"devices": "cuda:0,cuda:0", "split_mode": "tensor"}
LAYER: dict[str, Any] = {"devices": "cuda:0,cuda:0", "split_mode": "layer"}


class RandomSpec(ModelSpec):
    """A model that exists only in memory, without a file. Matrices repeat a few random rows."""

    def tensor(self, name: str) -> PackedTensor:
        info = self.tensors[name]
        form = info.format
        if len(info.shape) == 1:
            return PackedTensor.pack(torch.ones(info.shape), form)
        rows, columns = info.shape
        return PackedTensor(_packed(form.name, columns).repeat(rows // 64, 1), form)


@cache
def _packed(kind: str, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return get_format(kind).pack(torch.randn(64, columns, generator=generator) * columns**-0.5)


def random_spec(n_layers: int) -> RandomSpec:
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for tensor in SHAPE.tensors(get_format("Q4_K")):
        parts = tensor.name.split(".")
        if parts[0] != "blk" or int(parts[1]) < n_layers:
            form = "Q6_K" if parts[0] == "output" else tensor.format.name
            tensors[tensor.name] = tensor.shape, form
    numbers: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": n_layers,
        "llama.embedding_length": SHAPE.n_embd,
        "llama.attention.head_count": SHAPE.n_heads,
        "llama.attention.head_count_kv": SHAPE.n_kv_heads,
        "llama.feed_forward_length": SHAPE.n_ff,
        "llama.context_length": SHAPE.n_ctx,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(SHAPE.n_vocab)],
        "tokenizer.ggml.scores": [0.0] * SHAPE.n_vocab,
        "tokenizer.ggml.token_type": [6 if i < 256 else 1 for i in range(SHAPE.n_vocab)],
    }
    infos = {name: TensorInfo(name, shape, kind, 0, 0, 0) for name, (shape, kind) in tensors.items()}
    return RandomSpec(Path("random"), Metadata(numbers, Path("random")), infos, ())


@contextmanager
def engine_on(
    spec: RandomSpec, crew_options: dict[str, Any], kind: str, *, n_ctx: int, n_batch: int, n_parallel: int
) -> Iterator[Engine]:
    params, crew = read_params(spec), make_crew(**crew_options)
    backends = [backend_for(device.name, "auto") for device in crew.devices]
    config = CacheConfig(get_cache_type(kind), get_cache_type(kind))
    split = split_model(spec, params, crew, config, n_ctx=n_ctx, rotate=True)
    fit = fit_cache(split, backends, config, n_batch=n_batch, n_parallel=n_parallel)
    manager = CacheManager(fit.plan.group_specs(), config.block_size, salt=b"", find_prefixes=False)
    runner = Runner(split, backends, fit.plan)
    engine = Engine(
        runner, manager, Tokenizer.from_spec(spec),
        n_ctx=n_ctx, n_vocab=params.n_vocab, n_batch=n_batch, n_parallel=n_parallel,
    )  # fmt: skip
    try:
        yield engine
    finally:
        runner.close()
        torch.cuda.empty_cache()


def serve(engine: Engine, n_requests: int, n_prompt: int, n_new: int, seed: int) -> dict[str, float]:
    """Run all requests to the end. Returns tokens per second."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=n_new, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    requests: list[Request] = []
    for _ in range(n_requests):
        prompt = torch.randint(256, SHAPE.n_vocab, (n_prompt,), generator=generator).tolist()
        requests.append(engine.add(prompt, params))
    times = []
    while not all(request.is_finished for request in requests):
        is_decode = all(request.n_pending == 1 and request.n_computed >= n_prompt for request in requests)
        before = time.perf_counter()
        engine.step()
        if is_decode:
            times.append(time.perf_counter() - before)
    whole = time.perf_counter() - start
    return {
        "decode": n_requests * len(times) / sum(times) if times else 0.0,
        "median_step_ms": sorted(times)[len(times) // 2] * 1e3 if times else 0.0,
        "n_decode_steps": len(times),
        "total": n_requests * n_new / whole,
        "seconds": whole,
    }


def bench_engine(n_layers: int) -> list[dict[str, Any]]:
    spec, results = random_spec(n_layers), []

    def note(result: dict[str, Any]) -> None:
        results.append(result)
        print(result, flush=True)

    with engine_on(spec, ONE, "q8_0", n_ctx=640, n_batch=2048, n_parallel=64) as engine:
        serve(engine, 64, 512, 32, seed=1)  # warm-up: compiles kernels and captures graphs
        for i in range(3):
            note({"case": "64 x (512 + 64)", "cache": "q8_0", **serve(engine, 64, 512, 64, seed=2 + i)})
    with ExitStack() as stack:
        engines = [
            stack.enter_context(engine_on(spec, crew, "q8_0", n_ctx=1024, n_batch=512, n_parallel=8))
            for crew in (ONE, TENSOR, LAYER)
        ]
        for n_requests in (1, 8):
            for engine in engines:
                serve(engine, n_requests, 64, 16, seed=1)
            for i in range(5):  # alternating, so that the results are comparable
                for crew, engine in zip((ONE, TENSOR, LAYER), engines, strict=True):
                    speed = serve(engine, n_requests, 64, 128, seed=2 + i)
                    note({"case": f"{n_requests} x (64 + 128)", **crew, "cache": "q8_0", **speed})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--layers", type=int, default=SHAPE.n_layers)
    options = parser.parse_args()
    results = bench_engine(options.layers)
    report = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "results": results}
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
