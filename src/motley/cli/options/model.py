"""The flags for the model, and for how it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli.options.flag import flag

_PANEL = "Model"  # of --help

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file; of a model in several files, the first one. Default: the bundled model.",
    ),
]
ModelFlag = Annotated[
    Path | None, flag("-m", "--model", text="The same as MODEL.", panel=_PANEL, metavar="FILE")
]
HfRepo = Annotated[
    str | None,
    flag(
        "-hf",
        "-hfr",
        "--hf-repo",
        text="A model on Hugging Face, downloaded when it is first used. QUANT is Q4_K_M unless you name another.",
        panel=_PANEL,
        metavar="USER/REPO[:QUANT]",
    ),
]
HfFile = Annotated[
    str | None,
    flag("-hff", "--hf-file", text="The file of the repository to use.", panel=_PANEL, metavar="FILE"),
]
HfToken = Annotated[
    str | None,
    flag("-hft", "--hf-token", text="Access token. Default: HF_TOKEN.", panel=_PANEL, metavar="TOKEN"),
]
Offline = Annotated[
    bool, flag("--offline", text="Use only models that are already downloaded.", panel=_PANEL)
]
CtxSize = Annotated[
    int,
    flag(
        "-c",
        "--ctx-size",
        text="Context size in tokens. Default: the model's own, or as much of it as fits (perplexity and kv-quality: "
        "512; bench: what the test needs).",
        panel=_PANEL,
        metavar="N",
        min=0,
    ),
]
BatchSize = Annotated[
    int | None,
    flag(
        "-b",
        "--batch-size",
        text="Prompt tokens per step. Default: 2048 on GPUs, 512 on a CPU.",
        panel=_PANEL,
        metavar="N",
        min=1,
    ),
]
UBatchSize = Annotated[
    int | None,
    flag(
        "-ub",
        "--ubatch-size",
        text="The same as -b; if both are given, the smaller number is used.",
        panel=_PANEL,
        metavar="N",
        min=1,
    ),
]
Parallel = Annotated[
    int | None,
    flag(
        "-np",
        "--parallel",
        text="Sequences that share the cache at the same time. Default: one; serve: 8 on a CPU, 128 on GPUs.",
        panel=_PANEL,
        metavar="N",
        min=1,
    ),
]
Backend = Annotated[
    str,
    flag(
        "--backend",
        text="What computes on the CPU: cpu (native kernels), cpu-exact (the same with float32 activations), reference "
        "(slow, but exact by definition) or auto (the fastest available).",
        panel=_PANEL,
        metavar="NAME",
    ),
]
Threads = Annotated[
    int | None,
    flag(
        "-t",
        "--threads",
        text="CPU threads, shared by all devices. Default: one per core.",
        panel=_PANEL,
        metavar="N",
        min=1,
    ),
]
Verbose = Annotated[
    bool,
    flag(
        "-v",
        "--verbose",
        text="Show which kernels were chosen and compiled, how weights are read, and statistics after each answer.",
        panel=_PANEL,
    ),
]
NExpertUsed = Annotated[
    int | None,
    flag(
        "--n-expert-used",
        text="Experts used per token. Default: as the model file says.",
        panel=_PANEL,
        metavar="N",
    ),
]
NLayerExit = Annotated[
    int | None,
    flag(
        "--n-layer-exit",
        text="Run only the first N layers, then the output. Default: all layers.",
        panel=_PANEL,
        metavar="N",
    ),
]
