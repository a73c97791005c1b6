"""Triton kernels, one per file: the formula and the layout on top, a wrapper with checks, its reference named."""
