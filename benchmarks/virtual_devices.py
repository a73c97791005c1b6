"""Two virtual devices of one thread each against one device of two threads: decode speed, interleaved in one run.

A fixed split cannot compensate for a core that is used elsewhere; one device whose threads share their tasks can. So on
a virtual machine the last line shows the share of processor time that the host gave to other guests (steal time).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from motley import LLM
from motley.bench import SHAPES, Workload, measure, write_random_model


def processor_time() -> tuple[int, int]:
    """Ticks of all processors: demanded (all except idle), and the part of these that was stolen by the host."""
    try:
        ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:  # not Linux
        return 0, 0
    user, nice, system, _idle, _io, irq, softirq, steal = ticks
    return user + nice + system + irq + softirq + steal, steal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-160m")
    parser.add_argument("--layers", type=int, help="only the first layers of the shape")
    parser.add_argument("--weights", default="Q8_0")
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--rounds", type=int, default=7, help="each device set-up is timed once a round, in turn"
    )
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_random_model(path, flags.shape, flags.weights, n_layers=flags.layers)
        crews = {
            "one device, 2 threads": {"devices": "cpu"},
            "two devices, tensor": {"devices": "cpu,cpu", "split_mode": "tensor"},
            "two devices, layer": {"devices": "cpu,cpu", "split_mode": "layer"},
        }
        if SHAPES[flags.shape].experts is not None:
            crews["two devices, experts apart"] = {"devices": "cpu,cpu", "expert_split": "0,1"}
        models = {
            name: LLM(path, n_ctx=256, n_parallel=1, n_threads=2, spec="off", backend=flags.backend, **crew)
            for name, crew in crews.items()
        }
        work = [Workload(flags.tokens, is_prompt=False)]
        rates: dict[str, list[float]] = {name: [] for name in models}
        before = processor_time()
        for _ in range(flags.rounds):
            for name, llm in models.items():
                rates[name].append(measure(llm, work, repetitions=1)[0].rate)
        wanted, stolen = (b - a for a, b in zip(before, processor_time(), strict=True))
        for llm in models.values():
            llm.close()
    base = rates["one device, 2 threads"]
    ratios = {name: median(r / b for r, b in zip(each, base, strict=True)) for name, each in rates.items()}
    if flags.json:
        print(json.dumps({"shape": flags.shape, "weights": flags.weights, "rates": rates, "ratios": ratios}))
    for name, each in rates.items():
        print(f"{name:<26} {median(each):8.2f} tokens/s   ratio {ratios[name]:.2f}")
    if wanted:
        print(f"taken by the host: {stolen / wanted:.0%} of the processors' time")


if __name__ == "__main__":
    main()
