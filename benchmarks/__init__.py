"""Benchmarks: timings live here, as ratios within one run; tests never assert a time."""
