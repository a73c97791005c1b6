"""Matrix products on the CPU by number of rows: a step with drafts, or with several requests, beside one of one row.

python -m benchmarks rows --formats Q8_0,Q4_K,F16
python -m benchmarks rows --mib 8          # weights that stay in the caches
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch

from motley.backends.cpu.native import FORMATS, GROUP_ROWS, PLAIN_FORMATS, ROW_FORMATS, address, core
from motley.formats import FORMATS as LAYOUTS

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def make_programs(
    pool: Any, form: str, n_columns: int, n_bytes: int, is_mapped: bool
) -> tuple[dict[int, Any], list[torch.Tensor]]:
    """A program for each number of rows: products with matrices of 4 MiB. And its memory."""
    layout, number = LAYOUTS[form], (ROW_FORMATS if is_mapped else FORMATS)[form]
    row_bytes = n_columns // max(layout.block_size, 1) * layout.block_bytes
    n_out = min(4 * 2**20, n_bytes) // row_bytes // GROUP_ROWS * GROUP_ROWS
    weights = torch.ones(max(n_bytes // (n_out * row_bytes), 1), n_out * row_bytes, dtype=torch.uint8)
    most = max(ROWS)
    x, out = torch.ones(most, n_columns), torch.empty(most, n_out)
    codes = torch.zeros(core.quantized_bytes(most, n_columns), dtype=torch.uint8)
    programs = {}
    for n in ROWS:
        programs[n] = core.Program(pool)
        for weight in weights:
            part = (address(weight), number, n_out, 0, 0, address(out), n_out)
            quantized = 0 if form in PLAIN_FORMATS else address(codes)
            programs[n].matmul(address(x), n_columns, quantized, n, n_columns, [part], 0, False)
    memory = [weights, x, out, codes]
    return programs, memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="Q8_0,Q4_0,Q4_K,Q6_K,F16", help="Q8_0:map as in the file")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--mib", type=int, default=256, help="of weights that a step reads")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--instruction-set", default="")
    options = parser.parse_args()
    pool = core.Pool(options.threads, options.instruction_set, [])
    print(f"{pool.instruction_set}, {options.threads} threads, {options.mib} MiB, rows of {options.columns}")
    print("| format | GB/s, 1 row | " + " | ".join(f"{n} rows" for n in ROWS[1:]) + " |")
    print("|---" * (len(ROWS) + 1) + "|")
    for name in options.formats.split(","):
        form, _, is_mapped = name.partition(":")
        if options.columns % max(LAYOUTS[form].block_size, 2):
            raise SystemExit(f"{form} has blocks of {LAYOUTS[form].block_size} columns")
        programs, memory = make_programs(pool, form, options.columns, options.mib * 2**20, bool(is_mapped))
        n_bytes = memory[0].numel()
        best = dict.fromkeys(ROWS, float("inf"))
        repeats = max(1, 64 // options.mib)
        for _ in range(options.rounds):  # all in turn: the machine's state changes
            for n in ROWS:
                started = time.perf_counter()
                for _ in range(repeats):
                    programs[n].run()
                best[n] = min(best[n], (time.perf_counter() - started) / repeats)
        ratios = " | ".join(f"{best[n] / best[1]:.2f}" for n in ROWS[1:])
        print(f"| {name} | {n_bytes / best[1] / 1e9:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
