"""The bundled model on crews with a GPU: logits against the reference backend, and decode speed.

python benchmarks/cuda_crews.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import motley
from motley import LLM

MODEL = next((Path(motley.__file__).parent / "bundled").glob("*.gguf"))
TEXT = "Once upon a time there was a king who had three sons, and the youngest of them was called"
CREWS: tuple[dict[str, Any], ...] = (
    {"devices": "cuda:0"},
    {"devices": "cuda:0,cuda:0", "split_mode": "tensor"},
    {"devices": "cuda:0,cuda:0", "split_mode": "layer"},
    {"devices": "cuda:0,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
)


def answer(kind: str, **options: Any) -> tuple[np.ndarray, str, float]:
    """Logits of the text, a greedy continuation, and its tokens per second."""
    common = {"cache_type_k": kind, "cache_type_v": kind, "kv_block_size": 32, "n_ctx": 512}
    with LLM(MODEL, **common, **options) as llm:
        llm.finish_compiling()
        tokens = llm.tokenizer.encode(TEXT)
        logits = llm.logits(tokens)
        llm.generate(TEXT, max_tokens=16, temperature=0.0)  # warm-up: compiles kernels and captures graphs
        start = time.perf_counter()
        completion = llm.generate(TEXT, max_tokens=64, temperature=0.0)
        return logits, completion.text, 64 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "results": [],
    }
    for kind in ("f16", "q8_0", "q4_0"):
        expected, text, _ = answer(kind, backend="reference", devices="cpu")
        for crew in CREWS:
            try:
                logits, got, speed = answer(kind, **crew)
            except Exception as problem:
                print(f"{kind} {crew}: {problem!r}"[:600], flush=True)
                continue
            error = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
            same = float((logits.argmax(1) == expected.argmax(1)).mean())
            report["results"].append(
                dict(crew)
                | {
                    "cache": kind,
                    "error": error,
                    "same_top": same,
                    "same_text": got == text,
                    "tokens_per_s": speed,
                }
            )
            print(
                f"{kind} {crew}: error {error:.1e} same top {same:.2f} same text {got == text} {speed:.0f} t/s",
                flush=True,
            )
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
