"""Python's share of a step on the CPU, with several requests that decode at once: all time outside of native calls
that compute a step or choose its tokens.

Steps that make a plan are counted by themselves: each takes 10 ms or more of Python, once for each bucket of rows.

python -m benchmarks host_share --shape llama-160m --requests 8
python -m benchmarks host_share --profile            # with a profile of that share
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from motley import LLM
from motley.backends.cpu import backend as cpu_backend
from motley.backends.cpu import sampler as cpu_sampler
from motley.backends.cpu.native import core as native
from motley.bench import write_random_model
from motley.bench.shapes import SHAPES


class TimedTeam:
    """A team of native programs that adds up the seconds of its runs."""

    seconds = 0.0

    def __init__(self, team: Any) -> None:
        self._team = team

    def run(self, programs: Sequence[Any]) -> None:
        started = time.perf_counter()
        self._team.run(programs)
        TimedTeam.seconds += time.perf_counter() - started

    def steps(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        rounds = self._team.steps(*arguments)
        TimedTeam.seconds += time.perf_counter() - started
        return rounds

    def rows(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        tokens = self._team.rows(*arguments)
        TimedTeam.seconds += time.perf_counter() - started
        return tokens

    def draft(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        rounds = self._team.draft(*arguments)
        TimedTeam.seconds += time.perf_counter() - started
        return rounds


def time_native_calls() -> None:
    """Replace the CPU backend's teams by `TimedTeam`, and time its sampler: a repeated step computes and chooses in one
    native call, a scheduled one in two.
    """
    core = cpu_backend.core
    own = type("Core", (), {name: getattr(core, name) for name in dir(core) if not name.startswith("__")})
    own.Team = staticmethod(lambda n_devices: TimedTeam(core.Team(n_devices)))  # type: ignore[attr-defined]
    own.choose = staticmethod(timed_choose)  # type: ignore[attr-defined]
    cpu_backend.core = cpu_sampler.core = own


def timed_choose(*arguments: Any) -> Any:
    started = time.perf_counter()
    chosen = native.choose(*arguments)
    TimedTeam.seconds += time.perf_counter() - started
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-160m", choices=SHAPES)
    parser.add_argument("--weights", default="Q8_0")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="that each request decodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--spec", default="auto", help="drafters: auto, off, …")
    parser.add_argument(
        "--profile", action="store_true", help="profile the engine's thread instead of timing it"
    )
    flags = parser.parse_args()
    time_native_calls()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_random_model(path, flags.shape, flags.weights)
        with LLM(
            path, n_ctx=4096, n_parallel=flags.requests, n_threads=flags.threads, spec=flags.spec
        ) as llm:
            measure(llm, flags)


def measure(llm: LLM, flags: argparse.Namespace) -> None:
    engine = llm._loaded.engine
    step, spent = engine.step, [0.0]
    planning: list[float] = []  # seconds of Python
    profile = cProfile.Profile()

    def timed_step(*args: Any) -> Any:
        n_plans, native = engine.runner.n_plans, TimedTeam.seconds
        started = time.perf_counter()
        if flags.profile:
            profile.enable()
        result = step(*args)
        profile.disable()
        seconds = time.perf_counter() - started
        if engine.runner.n_plans == n_plans:
            spent[0] += seconds
        else:
            planning.append(seconds - (TimedTeam.seconds - native))
            TimedTeam.seconds = native
        return result

    engine.step = timed_step  # type: ignore[method-assign]
    shares, steps = [], []
    for i in range(flags.rounds + 1):
        spent[0] = TimedTeam.seconds = 0.0
        prompts = [[5 + i, 7, 11 + n] for n in range(flags.requests)]
        llm.generate(prompts, max_tokens=flags.tokens, temperature=flags.temperature, ignore_eos=True)
        if not i:
            planning.clear()
        else:
            shares.append(1 - TimedTeam.seconds / spent[0])
            steps.append(1e3 * spent[0] / flags.tokens)
    print(
        f"{flags.shape} {flags.weights}, {flags.requests} requests, {flags.threads} threads: a step takes "
        f"{median(steps):.2f} ms, Python {median(shares):.1%} of it ({min(shares):.1%} … {max(shares):.1%}), "
        f"{median(s * t for s, t in zip(shares, steps, strict=True)):.2f} ms"
    )
    if planning:
        print(f"and {len(planning)} steps with a new plan: {1e3 * median(planning):.1f} ms of Python each")
    if flags.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
