"""The server beside the bare engine: tokens/s through HTTP and without, latencies, and the front alone.

    python -m benchmarks serve                     bundled model, 1, 8 and 64 clients, each beside the bare engine
    python -m benchmarks serve --front             the front with a mock engine: tokens for a second of its CPU time

Both run in the same minutes, turn by turn, so that other work of the machine hits both; ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from load import Sample, load, percentile

from motley.bundled import bundled_model_path

HERE = Path(__file__).parent
PROMPT = "Tell me a story about a fox named Ada, a red kite and the sea."
GOOD_FIRST, GOOD_GAP = 0.5, 0.05  # seconds: the limits of a good request

FRONT = """
import sys
from motley.bundled import bundled_model_path
from motley.server.settings import ServerSettings
from motley.server.supervisor import serve
sys.exit(serve(ServerSettings(model=bundled_model_path(), port=0, engine_command=tuple(sys.argv[1:]))))
"""


@contextmanager
def running(command: list[str]) -> Iterator[tuple[str, int]]:
    """The address and process of a server, ready."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if match := re.search(r"listening on (http://\S+)", line):
                url = match[1]
            if line.startswith("motley serves"):
                break
        os.set_blocking(process.stderr.fileno(), False)  # what it says from now on is not read
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process. By nanoseconds: the ticks of /proc/PID/stat are too coarse."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def body(n_tokens: int) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": n_tokens, "ignore_eos": True, "temperature": 0.8}


def bare(llm: object, n_clients: int, n_requests: int, n_tokens: int) -> float:
    """Tokens/s of the same requests without HTTP, at its best: callers wait for whole answers; no piece wakes them."""

    async def run() -> None:
        todo = iter(range(n_requests))

        async def client() -> None:
            for number in todo:
                await llm.agenerate(  # type: ignore[attr-defined]
                    PROMPT, max_tokens=n_tokens, ignore_eos=True, temperature=0.8, seed=number
                )

        await asyncio.gather(*(client() for _ in range(n_clients)))

    started = time.perf_counter()
    asyncio.run(run())
    return n_requests * n_tokens / (time.perf_counter() - started)


def show(samples: list[Sample], seconds: float) -> str:
    firsts = [sample.first for sample in samples]
    gaps = [gap for sample in samples for gap in sample.gaps]
    good = [s for s in samples if s.first < GOOD_FIRST and statistics.fmean(s.gaps or [0]) < GOOD_GAP]
    return (
        f"TTFT p50 {1e3 * percentile(firsts, 50):.0f} p99 {1e3 * percentile(firsts, 99):.0f} ms, "
        f"ITL p50 {1e3 * percentile(gaps, 50):.1f} p99 {1e3 * percentile(gaps, 99):.1f} ms, "
        f"goodput {len(good) / seconds:.2f} of {len(samples) / seconds:.2f} requests/s"
    )


def compare(options: argparse.Namespace) -> None:
    from motley import LLM

    flags = ["-t", str(options.threads), "-np", "64", "-c", "512", "--log-disable"]
    command = [sys.executable, "-m", "motley", "serve", str(options.model), "--port", "0", *flags]
    with (
        LLM(options.model, n_threads=options.threads, n_parallel=64, n_ctx=512) as llm,
        running(command) as (url, pid),
    ):
        engine = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        gc.collect()
        gc.freeze()  # as the engine process does
        bare(llm, 2, 2, 8)
        asyncio.run(load(url, 2, 2, body(8)))
        for n_clients in options.clients:
            n_requests = max(16, 2 * n_clients)
            n_tokens = options.tokens
            rates, bare_rates, used, bare_cpu, engine_cpu, load_cpu = [], [], 0.0, 0.0, 0.0, 0.0
            last: tuple[list[Sample], float] = ([], 1.0)
            for _ in range(options.rounds):
                own = time.process_time()
                bare_rates.append(bare(llm, n_clients, n_requests, n_tokens))
                bare_cpu += time.process_time() - own
                before, engine_before = cpu_seconds(pid), cpu_seconds(engine)
                own = time.process_time()
                last = asyncio.run(load(url, n_clients, n_requests, body(n_tokens)))
                load_cpu += time.process_time() - own
                used += cpu_seconds(pid) - before
                engine_cpu += cpu_seconds(engine) - engine_before
                assert all(s.status == 200 and s.n_tokens == n_tokens for s in last[0])
                rates.append(n_requests * n_tokens / last[1])
            ratio = statistics.median(h / b for h, b in zip(rates, bare_rates, strict=True))
            n_all = options.rounds * n_requests * n_tokens
            print(
                f"{n_clients:3} clients: engine {statistics.median(bare_rates):7.0f} tokens/s, "
                f"HTTP {statistics.median(rates):7.0f}, ratio {ratio:.3f}\n"
                f"             CPU µs a token: engine bare {1e6 * bare_cpu / n_all:.0f}, behind HTTP "
                f"{1e6 * engine_cpu / n_all:.0f}, front {1e6 * used / n_all:.1f}, "
                f"clients {1e6 * load_cpu / n_all:.1f}\n"
                f"             {show(*last)}",
                flush=True,
            )


def front_alone(options: argparse.Namespace) -> None:
    mock = [sys.executable, str(HERE / "mock_engine.py"), "--parallel", "64"]
    with running([sys.executable, "-c", FRONT, *mock]) as (url, pid):
        for path in ("/v1/completions", "/v1/chat/completions"):
            request = body(options.tokens)
            if "chat" in path:
                request["messages"] = [{"role": "user", "content": PROMPT}]
            for n_clients in (1, 8, 64):
                before, n_requests = cpu_seconds(pid), 4 * n_clients
                samples, seconds = asyncio.run(load(url, n_clients, n_requests, request, path))
                used = cpu_seconds(pid) - before
                n_tokens = sum(sample.n_tokens for sample in samples)
                print(
                    f"{path:22} {n_clients:3} clients: {n_tokens / used:8.0f} tokens for a second of the front's CPU "
                    f"({1e6 * used / n_tokens:.1f} µs a token), {n_tokens / seconds:.0f} tokens/s",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--front", action="store_true", help="the front alone, with a mock engine")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--tokens", type=int, default=0, help="of each answer; default 128, with --front 1000"
    )
    parser.add_argument("--model", type=Path, default=bundled_model_path())
    parser.add_argument("--threads", type=int, default=1, help="of the engine, both ways")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.tokens = options.tokens or (1000 if options.front else 128)
    (front_alone if options.front else compare)(options)


if __name__ == "__main__":
    main()
