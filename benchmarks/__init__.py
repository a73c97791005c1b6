"""Benchmarks. All timings are here, as ratios within one run; tests never assert a time."""
