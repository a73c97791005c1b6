"""The server beside the bare engine: tokens/s through HTTP and without, latencies, and the front alone.

    python -m benchmarks serve                     bundled model, 1, 8 and 64 clients, each beside the bare engine
    python -m benchmarks serve --front             the front with a mock engine: tokens for a second of its CPU time

Both run in the same minutes, turn by turn. Rounds in which other programs took over 5 % of the machine do not count.
A request is good if its first token came within 0.5 s, and the others within 50 ms each on average.
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from load import Sample, load, percentile
from load_pool import LoadPool

from motley.bundled import bundled_model_path

HERE = Path(__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")
MAX_OTHER = 0.05  # share of all cores that other programs may use in a round
PROMPT = "Tell me a story about a fox named Ada, a red kite and the sea."
SAMPLING = {"temperature": 0.8, "speculative": "off"}
GOOD_FIRST, GOOD_GAP = 0.5, 0.05  # seconds: the limits of a good request

FRONT = """
import sys
from motley.bundled import bundled_model_path
from motley.server.settings import ServerSettings
from motley.server.supervisor import serve
sys.exit(serve(ServerSettings(model=bundled_model_path(), port=0, engine_command=tuple(sys.argv[1:]))))
"""


@contextmanager
def running(command: list[str], *, must_end_well: bool = False) -> Iterator[tuple[str, int]]:
    """The address and process of a server, ready. `must_end_well`: its exit code after SIGTERM must be 0."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if match := re.search(r"listening on (http://\S+)", line):
                url = match[1]
            if line.startswith("motley serves"):
                break
        # What it says from now on is read and dropped: a full pipe would stop it.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
    assert not (must_end_well and code), f"exit code {code}"


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process. By nanoseconds: the ticks of /proc/PID/stat are too coarse."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def body(n_tokens: int) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": n_tokens, "ignore_eos": True, **SAMPLING}


def answer_lengths(n_requests: int, n_tokens: int, *, vary: bool) -> list[int]:
    """Tokens of each answer; if they `vary`, from half to one and a half times `n_tokens`, evenly spread."""
    if not vary:
        return [n_tokens] * n_requests
    return [round(n_tokens * (0.5 + number * 0.618034 % 1)) for number in range(n_requests)]


def bare(llm: object, n_clients: int, lengths: Sequence[int]) -> float:
    """Tokens/s of the same requests without HTTP, at its best: callers wait for whole answers; no piece wakes them."""

    async def run() -> None:
        todo = iter(enumerate(lengths))

        async def client() -> None:
            for number, n_tokens in todo:
                await llm.agenerate(  # type: ignore[attr-defined]
                    PROMPT, max_tokens=n_tokens, ignore_eos=True, seed=number, **SAMPLING
                )

        await asyncio.gather(*(client() for _ in range(n_clients)))

    started = time.perf_counter()
    asyncio.run(run())
    return sum(lengths) / (time.perf_counter() - started)


def show(samples: list[Sample]) -> str:
    firsts = [sample.first for sample in samples]
    gaps = [gap for sample in samples for gap in sample.gaps]
    good = [s for s in samples if s.first < GOOD_FIRST and statistics.fmean(s.gaps or [0]) < GOOD_GAP]
    return (
        f"TTFT p50 {1e3 * percentile(firsts, 50):.0f} p99 {1e3 * percentile(firsts, 99):.0f} ms, "
        f"ITL p50 {1e3 * percentile(gaps, 50):.1f} p99 {1e3 * percentile(gaps, 99):.1f} ms, "
        f"{len(good)} of {len(samples)} requests good"
    )


@dataclass
class Round:
    """One measurement: tokens/s, CPU seconds of this process, the front and the engine, and other programs' share."""

    rate: float
    own: float
    front: float
    engine: float
    other: float  # of all cores

    @property
    def is_quiet(self) -> bool:
        return self.other < MAX_OTHER


def measured(work: Callable[[], float], front: int, engine: int, clients: Sequence[int] = ()) -> Round:
    """`work` returns tokens/s. `clients`: processes of this one."""

    def now() -> list[float]:
        busy = sum(int(ticks) for i, ticks in enumerate(_machine_ticks()) if i not in (3, 4)) / _TICKS
        own = time.process_time() + sum(map(cpu_seconds, clients))
        return [time.perf_counter(), busy, own, cpu_seconds(front), cpu_seconds(engine)]

    before = now()
    rate = work()
    seconds, busy, own, of_front, of_engine = (b - a for a, b in zip(before, now(), strict=True))
    n_cores = len(os.sched_getaffinity(0))
    other = (busy - own - of_front - of_engine) / seconds / n_cores
    return Round(rate, own, of_front, of_engine, other)


def _machine_ticks() -> list[str]:
    """user, nice, system, idle, iowait, irq, softirq, steal of all cores; not guests, which are in user and nice."""
    return Path("/proc/stat").read_text().splitlines()[0].split()[1:9]


def compare(options: argparse.Namespace) -> None:
    from motley import LLM

    flags = ["-t", str(options.threads), "-np", "64", "-c", "512", "--log-disable"]
    command = [sys.executable, "-m", "motley", "serve", str(options.model), "--port", "0", *flags]
    with (
        LLM(options.model, n_threads=options.threads, n_parallel=64, n_ctx=512) as llm,
        running(command) as (url, front),
        closing(LoadPool(options.client_processes)) as pool,
    ):
        engine = int(Path(f"/proc/{front}/task/{front}/children").read_text().split()[0])
        gc.collect()
        gc.freeze()  # as the engine process does
        n_tokens = options.tokens
        for n_clients in options.clients:
            n_requests = max(8, 2 * n_clients)
            lengths = answer_lengths(n_requests, n_tokens, vary=options.vary)
            samples: list[Sample] = []

            def over_http(
                n_clients: int = n_clients, lengths: list[int] = lengths, samples: list[Sample] = samples
            ) -> float:
                samples[:], seconds = pool.run(url, n_clients, len(lengths), body(n_tokens), lengths)
                assert all(sample.status == 200 for sample in samples)
                assert sorted(sample.n_tokens for sample in samples) == sorted(lengths)
                return sum(lengths) / seconds

            bare(llm, n_clients, [8] * n_clients)
            pool.run(url, n_clients, n_clients, body(8), [8] * n_clients)
            rounds = [
                (
                    measured(partial(bare, llm, n_clients, lengths), front, engine),
                    measured(over_http, front, engine, pool.pids),
                )
                for _ in range(options.rounds)
            ]
            report(n_clients, rounds, sum(lengths))
            print(f"             {show(samples)}", flush=True)


def report(n_clients: int, rounds: list[tuple[Round, Round]], n_tokens: int) -> None:
    """Medians over the rounds in which the machine was ours, or over all if there are none."""
    quiet = [each for each in rounds if each[0].is_quiet and each[1].is_quiet]
    used = quiet or rounds

    def median(value: Callable[[Round, Round], float]) -> float:
        return statistics.median(value(bare, http) for bare, http in used)

    ratio = median(lambda bare, http: http.rate / bare.rate)
    other = 100 * median(lambda bare, http: (bare.other + http.other) / 2)
    micro = 1e6 / n_tokens
    print(
        f"{n_clients:3} clients: engine {median(lambda bare, http: bare.rate):7.0f} tokens/s, "
        f"HTTP {median(lambda bare, http: http.rate):7.0f}, ratio {ratio:.3f} "
        f"({len(quiet)} of {len(rounds)} rounds quiet; other programs {other:.0f} %)\n"
        f"             CPU µs a token: engine bare {micro * median(lambda bare, http: bare.own):.0f}, "
        f"behind HTTP {micro * median(lambda bare, http: http.engine):.0f}, "
        f"front {micro * median(lambda bare, http: http.front):.1f}, "
        f"clients {micro * median(lambda bare, http: http.own):.1f}"
    )


def front_alone(options: argparse.Namespace) -> None:
    mock = [sys.executable, str(HERE / "mock_engine.py"), "--parallel", "64"]
    mock += ["--steps-per-second", str(options.steps)]
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
    parser.add_argument(
        "--steps", type=float, default=0.0, help="with --front: steps/s of the mock; default: no pause"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--tokens", type=int, default=0, help="of each answer; default 128, with --front 1000"
    )
    parser.add_argument("--model", type=Path, default=bundled_model_path())
    parser.add_argument("--threads", type=int, default=1, help="of the engine, both ways")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--client-processes",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) // 4),
        help="that the clients are spread over; default: one for each four cores",
    )
    parser.add_argument(
        "--vary",
        action="store_true",
        help="answers from half to one and a half times as long: clients do not all end and begin at the same moment",
    )
    options = parser.parse_args()
    options.tokens = options.tokens or (1000 if options.front else 128)
    (front_alone if options.front else compare)(options)


if __name__ == "__main__":
    main()
