"""The flags for the KV cache."""

from __future__ import annotations

from typing import Annotated

from motley.cli.options.flag import flag

_PANEL = "KV cache"  # of --help

CacheTypeK = Annotated[
    str,
    flag(
        "-ctk",
        "--cache-type-k",
        text="Type of cached keys: f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl.",
        panel=_PANEL,
        metavar="TYPE",
    ),
]
CacheTypeV = Annotated[
    str, flag("-ctv", "--cache-type-v", text="Type of cached values.", panel=_PANEL, metavar="TYPE")
]
StateType = Annotated[
    str,
    flag(
        "--state-type",
        text="Type of recurrent states (Qwen3-Next): f32, or bf16 for half the memory.",
        panel=_PANEL,
        metavar="TYPE",
    ),
]
KvRotation = Annotated[
    bool,
    flag(
        "--kv-rotation/--no-kv-rotation",
        text="Rotate quantized keys and values by a Hadamard matrix, which spreads outliers.",
        panel=_PANEL,
    ),
]
KvBlockSize = Annotated[
    int,
    flag(
        "--kv-block-size",
        text="Tokens per block: a power of two; on a GPU at least 16.",
        panel=_PANEL,
        metavar="N",
        min=1,
    ),
]
KvCacheTokens = Annotated[
    int | None,
    flag(
        "--kv-cache-tokens",
        text="Maximum number of tokens in the cache, for all requests together. It does not depend on -c.",
        panel=_PANEL,
        metavar="N",
        min=1,
    ),
]
KvCacheBytes = Annotated[
    str | None,
    flag(
        "--kv-cache-bytes",
        text="Maximum memory of the cache, over all devices: 2GiB.",
        panel=_PANEL,
        metavar="SIZE",
    ),
]
KvDemandPaged = Annotated[
    bool,
    flag(
        "--kv-cache-demand-paged",
        text="Allocate memory when blocks are first written, and release it when they are freed.",
        panel=_PANEL,
    ),
]
PrefixCache = Annotated[
    bool,
    flag(
        "--prefix-cache/--no-prefix-cache",
        text="Keep the KV cache of earlier prompts, until its memory is needed, and reuse it for equal beginnings.",
        panel=_PANEL,
    ),
]
