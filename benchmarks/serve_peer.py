"""Motley's server beside llama-server: the same streams over HTTP, at the same threads, slots and contexts.

    python -m benchmarks serve_peer --python build/xllamacpp/bin/python --clients 8
    python -m benchmarks serve_peer --python build/xllamacpp/bin/python --shape llama-160m --weights Q8_0

`--python`: an interpreter that has the PyPI package xllamacpp, which contains llama-server. Both servers run at the
same time, and are loaded turn by turn; figures are medians over the rounds. Prompts are the same for all clients, so
both find them in their caches after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from load import Sample, load
from serve import HERE, body, running, show

from motley.bench import write_random_model
from motley.bundled import bundled_model_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter with xllamacpp")
    parser.add_argument("--shape", help="random weights of this shape instead of the bundled model")
    parser.add_argument("--weights", default="Q8_0", help="the format of random weights")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with ExitStack() as stack:
        model = bundled_model_path()
        if options.shape:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = Path(folder) / f"{options.shape}.gguf"
            write_random_model(model, options.shape, options.weights)
        n_slots, n_ctx = str(options.clients), "512"
        flags = ["-t", str(options.threads), "-np", n_slots, "-c", n_ctx, "--log-disable", "--port", "0"]
        ours = [sys.executable, "-m", "motley", "serve", str(model), *flags]
        script = str(HERE / "peer_llama_server.py")
        theirs = [options.python, script, str(model), str(options.threads), n_slots, n_ctx]
        servers = {
            "motley": stack.enter_context(running(ours))[0],
            "llama-server": stack.enter_context(running(theirs))[0],
        }
        compare(servers, options)


def compare(servers: dict[str, str], options: argparse.Namespace) -> None:
    n_requests = 2 * options.clients
    rates: dict[str, list[float]] = {name: [] for name in servers}
    samples: dict[str, list[Sample]] = {}
    for number in range(options.rounds + 1):
        for name, url in servers.items():
            samples[name], seconds = asyncio.run(load(url, options.clients, n_requests, body(options.tokens)))
            assert all(s.status == 200 and s.n_tokens == options.tokens for s in samples[name]), name
            if number:  # the first round fills the caches
                rates[name].append(n_requests * options.tokens / seconds)
    for name in servers:
        print(f"{name:13} {statistics.median(rates[name]):7.0f} tokens/s  {show(samples[name])}")
    ours, theirs = rates.values()
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"{options.clients} clients, {options.threads} threads: {ratio:.2f} x llama-server")


if __name__ == "__main__":
    main()
