"""Decode speed next to busy programs: alone, with them, and the time to recover full speed after they end.

The busy programs are processes that count in an endless loop. One model decodes all the time: alone, then with them,
then alone again. A run with one thread gives the achievable speed: one thread has its own core as long as there are
fewer programs than cores. The recovery time is the time from the end of the busy programs to the first tenth of a
second with at least 0.9 times the speed alone.

    python -m benchmarks beside                          # the bundled model
    python -m benchmarks beside --shape llama-160m
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from motley import LLM
from motley.bench import write_random_model
from motley.bench.shapes import SHAPES
from motley.bundled import bundled_model_path

_WINDOW = 0.1  # seconds over which a speed is measured


@dataclass(frozen=True)
class Phase:
    """Completion times of tokens, in seconds since the start of the phase."""

    times: list[float]

    def rates(self) -> list[float]:
        """Tokens per second in each complete window."""
        n_windows = int(self.times[-1] / _WINDOW)
        counts = [0] * n_windows
        for t in self.times:
            if t < n_windows * _WINDOW:
                counts[int(t / _WINDOW)] += 1
        return [n / _WINDOW for n in counts]

    def rate(self) -> float:
        return len(self.times) / self.times[-1]


class Decoder:
    """Decodes tokens one by one; starts a new sequence when the current one is full."""

    def __init__(self, path: Path, n_threads: int) -> None:
        self._llm = LLM(path, n_ctx=512, n_parallel=1, n_threads=n_threads, spec="off")
        self._sequence = self._llm.raw_sequence()
        self._n_left = 0

    def decode(self, seconds: float) -> Phase:
        times: list[float] = []
        started = time.perf_counter()
        while not times or times[-1] < seconds:
            if not self._n_left:
                self._sequence.close()
                self._sequence = self._llm.raw_sequence()
                self._n_left = 256
            self._sequence.follow(1)
            self._n_left -= 1
            times.append(time.perf_counter() - started)
        return Phase(times)

    def close(self) -> None:
        self._sequence.close()
        self._llm.close()


@dataclass(frozen=True)
class Round:
    """Tokens per second, and the recovery time in seconds (infinite if not reached within the phase)."""

    alone: float
    beside: float
    way_back: float


def take_round(decoder: Decoder, n_others: int, seconds: float) -> Round:
    decoder.decode(0.5)  # makes plans, and touches memory for the first time
    alone = decoder.decode(seconds)
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(n_others)]
    try:
        decoder.decode(0.3)  # until the busy programs have started
        beside = decoder.decode(2 * seconds)
    finally:
        for other in others:
            other.kill()
            other.wait()
    enough = 0.9 * median(alone.rates())
    rates = decoder.decode(2.0).rates()
    way_back = next(((i + 1) * _WINDOW for i, rate in enumerate(rates) if rate >= enough), float("inf"))
    return Round(alone.rate(), beside.rate(), way_back)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights of this shape; default: the bundled model"
    )
    parser.add_argument("--weights", default="Q8_0")
    parser.add_argument("--threads", default="2,1", help="numbers of threads, by comma")
    parser.add_argument("--others", type=int, default=1, help="busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each phase")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf" if flags.shape else bundled_model_path()
        if flags.shape:
            write_random_model(path, flags.shape, flags.weights)
        print(f"{flags.shape or 'bundled model'}, tokens/s: medians of {flags.rounds} rounds (range)")
        print(f"| threads | alone | beside {flags.others} busy | way back, seconds |\n|---|---|---|---|")
        for n_threads in map(int, flags.threads.split(",")):
            decoder = Decoder(path, n_threads)
            rounds = [take_round(decoder, flags.others, flags.seconds) for _ in range(flags.rounds)]
            decoder.close()
            cells = [spread([getattr(r, key) for r in rounds], digits) for key, digits in _COLUMNS]
            print(f"| {n_threads} | {' | '.join(cells)} |", flush=True)


_COLUMNS = (("alone", 0), ("beside", 0), ("way_back", 1))


def spread(values: list[float], digits: int) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} … {max(values):,.{digits}f})"


if __name__ == "__main__":
    main()
