"""Wall times of `LLM`, its engine and `motley run` as a user sees them, with an empty and with a full kernel cache.

    python -m benchmarks user_path [--device auto] [--shape llama-8b | --model FILE] [--out FILE] [--only warm]

Each part is a separate process. If a row of a part fails, the remaining rows still run. The model is random
(matrices Q4_K, every fourth ffn_down and the output Q6_K, as in Q4_K_M files); its file is kept for later runs
and is in the page cache.

    import     `import motley`, `motley --help`
    cold       an empty kernel cache: load, first answers, first batch of each number of requests
    warm       a second process: the same, then speeds of 1, 64 and 128 requests, greedy and sampled
    defaults   LLM(model) without options, beside LLMs with explicit numbers: 128 requests by the clock
    long       a prompt of 40,000 tokens, q8_0 KV
    run        wall time of `motley run`, twice

Step times are measured in the engine's thread: `longest_step` is the longest time without progress of requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.watching import wait_for_compilers, watch_steps

PARTS = ("import", "cold", "warm", "defaults", "long", "run")
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "seed": 1}
USUAL = {"seed": 1}  # the defaults: temperature, top-k, top-p, min-p
PENALIZED = USUAL | {"repeat_penalty": 1.1}
FIRST_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)


class Report:
    """Rows by name. The file is written after each row, so a crash loses no finished row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Any] = {}

    def add(self, name: str, measure: Callable[[], Any]) -> Any:
        """The row."""
        try:
            self._rows[name] = measure()
        except Exception as error:
            self._rows[name] = {
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-1500:],
            }
        print(f"  {name}: {json.dumps(self._rows[name])[:300]}", flush=True)
        self._path.write_text(json.dumps(self._rows, indent=1))
        return self._rows[name]


class Watched:
    """An LLM whose engine's steps are timed."""

    def __init__(self, path: Path, **options: Any) -> None:
        from motley import LLM

        self.llm = LLM(path, **options)
        self.n_vocab = self.llm._loaded.engine.n_vocab
        self._n_asked = 0
        self.steps = watch_steps(self.llm._loaded.engine)

    def loaded(self) -> dict[str, Any]:
        warm_up = self.llm.warm_up
        return {
            "load_s": round(self.llm.load_seconds, 3),
            "compile_s": round(warm_up.seconds, 3),
            "kernels": len(warm_up.kernels),
            "kernel_core_s": round(sum(s for _, s in warm_up.kernels), 1),
            "failures": warm_up.failures,
            "devices": self.llm.chosen_devices,
            "notices": self.llm.notices,
            "n_ctx": self.llm.n_ctx,
            "host_peak_mib": host_peak_mib(),
            "imported": [
                name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules
            ],
        }

    def prompts(self, n: int, n_tokens: int) -> list[list[int]]:
        """New prompts at each call, so that there are no prefix hits."""
        self._n_asked += 1
        rng = random.Random(self._n_asked)
        return [[rng.randrange(256, self.n_vocab) for _ in range(n_tokens)] for _ in range(n)]

    def serve(self, n: int, n_prompt: int, n_new: int, **sampling: Any) -> dict[str, Any]:
        """Run `n` requests at once. Returns tokens per second in total, and of the steps in which all decode."""
        self.steps.clear()
        prompts = self.prompts(n, n_prompt)
        started = time.perf_counter()
        done = self.llm.generate(prompts, max_tokens=n_new, ignore_eos=True, **sampling)
        elapsed = time.perf_counter() - started
        failed = [str(each.error) for each in done if each.error is not None]
        decodes = sorted(s for n_tokens, chosen, s in self.steps if n_tokens == chosen == n)
        result: dict[str, Any] = {
            "seconds": round(elapsed, 4),
            "tokens_per_s": round(sum(len(each.tokens) for each in done) / elapsed, 1),
            "longest_step_s": round(max((s for *_, s in self.steps), default=0.0), 4),
            "n_steps": len(self.steps),
        }
        if decodes:
            median = decodes[len(decodes) // 2]
            rate = n * len(decodes) / sum(decodes)
            result |= {"decode_per_s": round(rate, 1), "median_step_ms": round(median * 1e3, 3)}
        if n == 1:
            timings = done[0].timings
            result |= {
                "new_rate": round(timings.new_rate, 1),
                "first_token_s": round(timings.prompt_seconds, 4),
            }
        return result | ({"failed": failed[:3]} if failed else {})


def host_peak_mib() -> int:
    """The most memory of this process so far. getrusage would tell of the process that started it, too."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measure_imports(report: Report, args: argparse.Namespace) -> None:
    def clock(*command: str) -> Callable[[], Any]:
        def run() -> Any:
            times = []
            for _ in range(3):
                started = time.perf_counter()
                subprocess.run([sys.executable, *command], check=True, capture_output=True)
                times.append(round(time.perf_counter() - started, 3))
            return {"seconds": times}

        return run

    report.add("python", clock("-c", "pass"))
    report.add("import motley", clock("-c", "import motley"))
    report.add("motley --help", clock("-m", "motley", "--help"))


def measure_start(report: Report, args: argparse.Namespace) -> Watched | None:
    """Measure loading and the first answers."""
    held: list[Watched] = []

    def load() -> Any:
        started = time.perf_counter()
        held.append(
            Watched(
                args.model, devices=args.device, cache_type_k="q8_0", cache_type_v="q8_0", n_ctx=args.n_ctx
            )
        )
        return held[0].loaded() | {"load_and_import_s": round(time.perf_counter() - started, 3)}

    report.add("load", load)
    if not held:
        return None
    watched = held[0]
    report.add("first prompt of 2048, 8 tokens", lambda: watched.serve(1, args.long_prompt, 8, **GREEDY))
    for n in FIRST_SIZES:
        report.add(f"first {n} requests of 16 + 8", lambda n=n: watched.serve(n, 16, 8, **GREEDY))
    report.add("first prompt of 700", lambda: watched.serve(1, args.long_prompt // 3, 4, **GREEDY))
    return watched


def measure_cold(report: Report, args: argparse.Namespace) -> None:
    watched = measure_start(report, args)
    if watched is not None:
        report.add("kernels", lambda: watched.llm.warm_up.kernels)
        watched.llm.close()


def measure_warm(report: Report, args: argparse.Namespace) -> None:
    watched = measure_start(report, args)
    if watched is None:
        return
    watched.llm.finish_compiling()
    report.add("kernels that failed", lambda: watched.llm.warm_up.failures)
    n = args.n_new
    for name, sampling in (
        ("greedy", GREEDY),
        ("sampled", SAMPLED),
        ("usual", USUAL),
        ("penalized", PENALIZED),
    ):
        for turn in (1, 2):
            report.add(f"1 request, {name}, {turn}", lambda s=sampling: watched.serve(1, 64, n, **s))
    for turn in (1, 2):
        for name, sampling in (
            ("greedy", GREEDY),
            ("sampled", SAMPLED),
            ("usual", USUAL),
            ("penalized", PENALIZED),
        ):
            report.add(
                f"128 requests of 64 + 128, {name}, {turn}",
                lambda s=sampling: watched.serve(128, 64, n // 2, **s),
            )
    for turn in (1, 2):
        report.add(f"64 requests of 512 + 64, {turn}", lambda: watched.serve(64, 512, 64, **GREEDY))
    report.add("seeds agree alone and in a batch", lambda: _seeds_agree(watched))
    report.add("profile of 1 request", lambda: _profile(watched))
    watched.llm.close()


def _seeds_agree(watched: Watched) -> dict[str, int]:
    """How many of 8 answers of 24 tokens are the same alone and in a batch; rounding differs between batch sizes."""
    prompts = watched.prompts(8, 24)
    together = watched.llm.generate(prompts, max_tokens=24, ignore_eos=True, temperature=0.8, seed=5)
    alone = [
        watched.llm.generate(p, max_tokens=24, ignore_eos=True, temperature=0.8, seed=5) for p in prompts
    ]
    again = [
        watched.llm.generate(p, max_tokens=24, ignore_eos=True, temperature=0.8, seed=5) for p in prompts
    ]
    return {
        "alone twice": sum(a.tokens == b.tokens for a, b in zip(alone, again, strict=True)),
        "alone and together": sum(a.tokens == b.tokens for a, b in zip(alone, together, strict=True)),
    }


def _profile(watched: Watched) -> list[str]:
    """Profile of the engine's thread for one request: the ten functions with the most own time."""
    import cProfile
    import io
    import pstats

    engine, profile = watched.llm._loaded.engine, cProfile.Profile()
    step = engine.step
    engine.step = lambda *given: profile.runcall(step, *given)  # type: ignore[method-assign]
    watched.serve(1, 64, 100, **USUAL)
    engine.step = step  # type: ignore[method-assign]
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return [line[-120:] for line in text.getvalue().splitlines()[6:36]]


def measure_defaults(report: Report, args: argparse.Namespace) -> None:
    """`LLM(model)` and LLMs with explicit numbers, loaded in turn: 128 requests by the clock."""
    numbers = {"devices": args.device, "n_ctx": args.n_ctx, "n_batch": 2048, "n_parallel": 128}
    rates: dict[str, list[float]] = {}
    for turn in (1, 2):
        for name, options in (
            ("defaults", {}),
            ("explicit, q8_0", numbers | {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
            ("explicit, f16", numbers),
        ):
            rates.setdefault(name, []).extend(_rates(report, args, f"{name}, {turn}", options))
    medians = {name: sorted(found)[len(found) // 2] for name, found in rates.items() if found}

    def ratios() -> Any:
        best = medians["defaults"]
        others = {f"defaults / {n}": round(best / rate, 3) for n, rate in medians.items() if n != "defaults"}
        return {"tokens_per_s": medians} | others

    report.add("128 requests of 64 + 128, by the clock", ratios)


def _rates(report: Report, args: argparse.Namespace, name: str, options: dict[str, Any]) -> list[float]:
    """Tokens per second of two runs, after one that makes plans. The LLM is closed, so that the next one has room."""
    import gc

    import torch

    held: list[Watched] = []

    def load() -> Any:
        held.append(Watched(args.model, **options))
        held[0].llm.finish_compiling()
        sizes = held[0].llm.engine.scheduler
        return held[0].loaded() | {"n_batch": sizes.n_batch, "n_parallel": sizes.n_parallel}

    report.add(f"{name}: load", load)
    if not held:
        return []
    rows = [
        report.add(
            f"{name}: 128 requests of 64 + 128, {number}",
            lambda: held[0].serve(128, 64, args.n_new // 2, **GREEDY),
        )
        for number in (1, 2, 3)
    ]
    report.add(f"{name}: 1 request", lambda: held[0].serve(1, 64, args.n_new, **USUAL))
    held.pop().llm.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [row["tokens_per_s"] for row in rows[1:] if "failed" not in row and "tokens_per_s" in row]


def measure_long(report: Report, args: argparse.Namespace) -> None:
    n = 20 * args.long_prompt - 960  # 40,000
    options = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "n_ctx": n + 256, "n_parallel": 1}
    held: list[Watched] = []

    def load() -> Any:
        held.append(Watched(args.model, devices=args.device, **options))
        held[0].llm.finish_compiling()
        return held[0].loaded()

    report.add("load", load)
    for turn in (1, 2) if held else ():
        report.add(f"a prompt of {n}, {turn}", lambda: _prompt_rate(held[0], n))


def _prompt_rate(watched: Watched, n: int) -> dict[str, Any]:
    result = watched.serve(1, n, 2, **GREEDY)
    return result | {"prompt_per_s": round(n / result["first_token_s"], 1)}


def measure_run(report: Report, args: argparse.Namespace) -> None:
    def run(*flags: str) -> Any:
        command = [sys.executable, "-m", "motley", "run", str(args.model), "-p", "t300 t301 t302", "-n", "64"]
        command += ["--ignore-eos", "--temp", "0", "--json", "-no-cnv", *flags]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        elapsed = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(done.stderr[-800:])
        answer = json.loads(done.stdout)
        answer.pop("text")
        answer.pop("tokens")
        timings = answer["timings"]
        return {
            "clock_s": round(elapsed, 3),
            "load_s": round(answer["load_seconds"], 3),
            "first_token_s": round(timings["prompt_seconds"], 4),
            "tokens_per_s": round((timings["new_tokens"] - 1) / max(timings["new_seconds"], 1e-9), 1),
            "stderr": done.stderr[-600:],
        }

    # -c limits the context: otherwise a cache of 131,072 tokens would be allocated first.
    for turn in (1, 2):
        report.add(f"motley run -c 4096, {turn}", lambda: run("-c", "4096"))
        # The first one leaves kernels to be compiled; the second one should find all of them.
        report.add(f"compiled after that, {turn}", lambda: {"seconds": round(wait_for_compilers(60), 1)})
    report.add("motley run, no flags", run)


MEASURES = {
    "import": measure_imports,
    "cold": measure_cold,
    "warm": measure_warm,
    "defaults": measure_defaults,
    "long": measure_long,
    "run": measure_run,
}


def make_model(shape: str) -> Path:
    from motley.bench import random_model_path, write_random_model

    path = random_model_path(shape, "Q4_K").with_name(f"random-{shape}-Q4_K_M.gguf")
    if not path.exists():
        write_random_model(path, shape, "Q4_K", finer="Q6_K")
    with path.open("rb", buffering=0) as file:  # reads the file into the page cache
        while file.read(1 << 26):
            pass
    return path


def run_part(part: str, args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """The part's rows, measured in a separate process. If this process is stopped, they are in a file of their own."""
    out = args.out.with_suffix(f".{part}.json")
    out.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.user_path",
        "--part",
        part,
        "--model",
        str(args.model),
        "--out",
        str(out),
    ]
    command += ["--device", args.device, "--n-new", str(args.n_new), "--long-prompt", str(args.long_prompt)]
    command += ["--n-ctx", str(args.n_ctx)]
    started = time.perf_counter()
    print(f"{part}:", flush=True)
    failure = None
    try:
        done = subprocess.run(
            command, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, timeout=args.limit, check=False
        )
        failure = f"exit code {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:
        failure = f"longer than {args.limit} s"
    rows: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    out.unlink(missing_ok=True)
    rows["seconds of this part"] = round(time.perf_counter() - started, 1)
    return rows | ({"failure": failure} if failure else {})


def environment() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "torch": torch.__version__, "triton": version, "gpu": gpu, "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--model", type=Path, help="a file, instead of random weights of --shape")
    parser.add_argument("--out", type=Path, default=Path("user_path.json"))
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--limit", type=int, default=120, help="seconds for each part")
    parser.add_argument("--n-new", type=int, default=256)
    parser.add_argument("--long-prompt", type=int, default=2048)
    parser.add_argument("--n-ctx", type=int, default=8192, help="context of the parts `cold` and `warm`")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        MEASURES[args.part](Report(args.out), args)
        return
    started = time.perf_counter()
    report: dict[str, Any] = environment()
    args.model = args.model or make_model(args.shape)
    report["model"] = {"file": args.model.name, "bytes": args.model.stat().st_size}
    report["seconds of the model file"] = round(time.perf_counter() - started, 1)
    with tempfile.TemporaryDirectory() as scratch:
        for part in args.only or PARTS:
            # `motley run` has a kernel cache of its own, so that both it and `cold` begin with an empty one.
            cache = Path(scratch) / ("run" if part == "run" else "others")
            report[part] = run_part(part, args, cache)
            args.out.write_text(json.dumps(report, indent=1))
    report["seconds in all"] = round(time.perf_counter() - started, 1)
    args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
