"""`make bench`: list the benchmarks, or run those given by name. Each has its own --help."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> None:
    names = sorted(p.stem for p in FOLDER.glob("*.py") if _is_benchmark(p))
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print("usage: python -m benchmarks NAME [FLAGS]\n\nbenchmarks:")
        for name in names:
            summary = (FOLDER / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
            print(f"  {name:<18} {summary}")
        raise SystemExit(len(sys.argv) > 1)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(FOLDER))  # as if the file were run directly: the GPU benchmarks import each other
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")


def _is_benchmark(path: Path) -> bool:
    """Whether a file is a benchmark of its own: it reads flags. Others are parts of benchmarks."""
    is_part = path.stem.startswith(("_", "peer_"))
    return not is_part and "ArgumentParser" in path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
