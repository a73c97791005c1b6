"""Draw decode speed over depth on a GPU: Motley's kernel steps and llama.cpp, from results/*.json, for cuda-notes.md.

python -m benchmarks plot_depth
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from motley.cli.bench_plot import Series, draw
from motley.cli.svg import COLOURS

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
CACHE_TYPES = ("f16", "q8_0", "q4_0")


def newest(pattern: str) -> Path:
    """The newest result file that matches `pattern`; file names begin with the date."""
    return max(RESULTS.glob(pattern))


def lines(data: dict[str, Any], engine: str, weights: str, *, is_dashed: bool = False) -> list[Series]:
    """Single-sequence decode with these weights, a line for each cache type."""
    found = []
    for number, cache in enumerate(CACHE_TYPES):
        points = sorted(
            (row["depth"], row["tokens_per_s"])
            for row in data["results"]
            if (row["weights"], row["cache"], row["batch"], row["new"]) == (weights, cache, 1, 1)
        )
        if points:
            found.append(Series(f"{engine} {cache}", tuple(points), COLOURS[number], is_dashed))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", type=Path, default=newest("*-h200-table.json"), help="of cuda_model")
    parser.add_argument("--theirs", type=Path, default=newest("*-h200-llama.cpp.json"))
    parser.add_argument("--weights", default="Q4_K")
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "docs" / "decode-h200.svg")
    args = parser.parse_args()
    ours, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in (args.ours, args.theirs))
    series = lines(ours, "Motley", args.weights) + lines(theirs, "llama.cpp", args.weights, is_dashed=True)
    title = f"{ours['gpu']}, {ours['model']}, {args.weights}"
    args.out.write_text(draw(series, title), encoding="utf-8")
    print(f"{args.out}: {args.ours.name} beside {args.theirs.name}")


if __name__ == "__main__":
    main()
