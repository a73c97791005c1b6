"""A dense model on a GPU beside a CPU: tokens per second of crews, and what their devices' own times add up to.

    python -m benchmarks cuda_beside [--device cuda:0,cpu] [--shape llama-8b] [--out FILE]

Each crew decodes and reads a prompt of 512, through the runner, host included. `own_times`: by layers, a token takes
the sum of what each device takes for its part of the bytes; the crew's decode speed as a share of that. `details` say
from how many rows on a prompt is multiplied by copies of the CPU's weights, measured while the model is loaded. The
file of weights is made once (XDG_CACHE_HOME).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import Report
from motley import LLM
from motley.bench import SHAPES, Workload, measure, random_model_path, write_random_model

CREWS = (("layer", (15, 1)), ("tensor", (20, 1)), ("tensor", (30, 1)))
PROMPT = 512


def speeds(path: Path, devices: str, n_decoded: int, **options: Any) -> dict[str, Any]:
    """Tokens per second, and what the model says of itself."""
    types = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    with LLM(path, devices=devices, n_ctx=1024, n_batch=512, n_parallel=4, **types, **options) as llm:
        llm.finish_compiling()
        decode, prompt = measure(llm, [Workload(n_decoded, False), Workload(PROMPT, True)], 3)
        found = {
            "decode": round(decode.rate, 1),
            "prompt": round(prompt.rate, 1),
            "load_s": round(llm.load_seconds, 2),
            "details": llm.details,
            "failures": llm.warm_up.failures,
        }
    torch.cuda.empty_cache()
    return found


def own_times(rates: list[float], shares: tuple[int, ...]) -> float:
    """Tokens per second of devices that compute one after the other, each its share of the bytes."""
    return 1 / sum(share / sum(shares) / rate for share, rate in zip(shares, rates, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0,cpu", help="two devices; the first is the faster one")
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--weights", default="Q4_K")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    path = random_model_path(args.shape, args.weights, args.layers)
    if not path.exists():
        write_random_model(path, args.shape, args.weights, n_layers=args.layers)
    report, alone = Report(args.out), args.device.split(",")
    for device, n in zip(alone, (64, 16), strict=True):
        report.add(device, lambda device=device, n=n: speeds(path, device, n))
    rates = [report.rows[device].get("decode") for device in alone]

    def crew(mode: str, shares: tuple[int, int]) -> dict[str, Any]:
        found = speeds(path, args.device, 64, split_mode=mode, tensor_split=shares)
        if mode == "layer" and all(rates):
            found["own_times"] = round(own_times(rates, shares), 1)
            found["of own_times"] = round(found["decode"] / found["own_times"], 3)
        return found

    for mode, shares in CREWS:
        report.add(f"{mode} {shares[0]}:{shares[1]}", lambda mode=mode, shares=shares: crew(mode, shares))


if __name__ == "__main__":
    main()
