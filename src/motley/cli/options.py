"""The flags of all commands. A flag that llama.cpp also has has the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _flag(*names: str, text: str, panel: str | None = None, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


# --- the model ----------------------------------------------------------------------------------------------

_MODEL = "Model"

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="A .gguf file (the first one, if there are parts). Default: the bundled model."
    ),
]
ModelFlag = Annotated[
    Path | None, _flag("-m", "--model", text="The same as MODEL.", panel=_MODEL, metavar="FILE")
]
CtxSize = Annotated[
    int,
    _flag(
        "-c",
        "--ctx-size",
        text="Tokens of context; 0: as the model was trained, cut to what fits (perplexity, kv-quality: 512; "
        "bench: what it needs).",
        panel=_MODEL,
        min=0,
    ),
]
Backend = Annotated[
    str,
    _flag(
        "--backend",
        text="What computes on the CPU. auto: the best there is; cpu: native kernels; cpu-exact: the same with float32 "
        "activations; reference: slow, and right by definition.",
        panel=_MODEL,
        metavar="NAME",
    ),
]
Threads = Annotated[
    int | None,
    _flag("-t", "--threads", text="CPU threads, over all devices. Default: all cores.", panel=_MODEL, min=1),
]

Verbose = Annotated[
    bool,
    _flag(
        "-v",
        "--verbose",
        text="Say what was chosen and compiled while loading: kernels, and how weights are read.",
        panel=_MODEL,
    ),
]

# --- the crew -----------------------------------------------------------------------------------------------

_CREW = "Devices"

Device = Annotated[
    str,
    _flag(
        "-dev",
        "--device",
        text="Devices that share the model, by comma: cpu, cuda:0; auto: all GPUs, or the CPU; the same one "
        "twice makes two virtual devices. "
        "cpu:0-7, cpu:0+2+4 and cpu:node0 keep to those cores, with a thread on each.",
        panel=_CREW,
        metavar="NAMES",
    ),
]
SplitMode = Annotated[
    str | None,
    _flag(
        "-sm",
        "--split-mode",
        text="none: the first device only; layer: whole layers each; tensor: a part of every tensor each. "
        "Default: layer, for several devices.",
        panel=_CREW,
        metavar="MODE",
        show_default=False,
    ),
]
TensorSplit = Annotated[
    str | None,
    _flag(
        "-ts",
        "--tensor-split",
        text="Proportions, by comma: 3,1. Default: as the memory budgets, or equal.",
        panel=_CREW,
        metavar="N,N,…",
        show_default=False,
    ),
]
DeviceMemory = Annotated[
    str | None,
    _flag(
        "--device-memory",
        text="What each device may use at most, by comma: 2GiB,1GiB.",
        panel=_CREW,
        metavar="SIZES",
        show_default=False,
    ),
]

SplitExperts = Annotated[
    str,
    _flag(
        "--split-experts",
        text="How tensor mode shares out experts. ffn: a part of every expert each; whole: whole experts each; auto: "
        "what meets the proportions better.",
        panel=_CREW,
        metavar="WAY",
    ),
]

# --- how much of the model ----------------------------------------------------------------------------------

NExpertUsed = Annotated[
    int | None,
    _flag(
        "--n-expert-used",
        text="Experts that each token uses. Default: as many as the file says.",
        panel=_MODEL,
        min=1,
        show_default=False,
    ),
]
NLayerExit = Annotated[
    int | None,
    _flag(
        "--n-layer-exit",
        text="Run only the first so many layers, then the output. Default: all.",
        panel=_MODEL,
        min=1,
        show_default=False,
    ),
]

# --- the cache ----------------------------------------------------------------------------------------------

_CACHE = "KV cache"

CacheTypeK = Annotated[
    str,
    _flag(
        "-ctk",
        "--cache-type-k",
        text="Type of cached keys: f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl.",
        panel=_CACHE,
        metavar="TYPE",
    ),
]
CacheTypeV = Annotated[
    str, _flag("-ctv", "--cache-type-v", text="Type of cached values.", panel=_CACHE, metavar="TYPE")
]
KvRotation = Annotated[
    bool,
    _flag(
        "--kv-rotation/--no-kv-rotation",
        text="Rotate quantized keys and values by a Hadamard matrix, which spreads outliers.",
        panel=_CACHE,
    ),
]
KvBlockSize = Annotated[
    int,
    _flag(
        "--kv-block-size",
        text="Tokens in a block: a power of two, on a GPU at least 16.",
        panel=_CACHE,
        min=1,
    ),
]
KvCacheTokens = Annotated[
    int | None,
    _flag(
        "--kv-cache-tokens",
        text="A hard limit in tokens, whatever -c says.",
        panel=_CACHE,
        min=1,
        show_default=False,
    ),
]
KvCacheBytes = Annotated[
    str | None,
    _flag(
        "--kv-cache-bytes",
        text="A hard limit in bytes over all devices: 2GiB.",
        panel=_CACHE,
        metavar="SIZE",
        show_default=False,
    ),
]
KvDemandPaged = Annotated[
    bool,
    _flag(
        "--kv-cache-demand-paged",
        text="Take memory when blocks are first written, and give it back when they are freed.",
        panel=_CACHE,
    ),
]
PrefixCache = Annotated[
    bool,
    _flag(
        "--prefix-cache/--no-prefix-cache",
        text="Keep finished prompts to be found again, until their room is needed.",
        panel=_CACHE,
    ),
]

# --- the text -----------------------------------------------------------------------------------------------

Prompt = Annotated[str | None, _flag("-p", "--prompt", text="The text.", metavar="TEXT")]
File = Annotated[
    Path | None,
    _flag("-f", "--file", text="Read the text from a file; -: from standard input.", metavar="FILE"),
]
Chunks = Annotated[int | None, _flag("--chunks", text="Read only the first so many chunks.", min=1)]
SystemPrompt = Annotated[
    str | None,
    _flag("-sys", "--system-prompt", text="How the model should behave in a chat.", metavar="TEXT"),
]
Conversation = Annotated[
    bool | None,
    _flag(
        "-cnv/-no-cnv",
        "--conversation/--no-conversation",
        text="Use the model's chat template, and after -p go on chatting; or only continue the text. "
        "Default: the template, if there is one, for one answer to -p.",
        show_default=False,
    ),
]
SingleTurn = Annotated[bool, _flag("-st", "--single-turn", text="Leave after one answer.")]
Predict = Annotated[
    int,
    _flag(
        "-n", "--predict", "--n-predict", text="At most so many new tokens; -1: until the context is full."
    ),
]
ReversePrompt = Annotated[
    list[str] | None,
    _flag("-r", "--reverse-prompt", text="Stop before this text. May be repeated.", metavar="TEXT"),
]
ContextShift = Annotated[
    bool,
    _flag("--context-shift", text="Go on when the context is full: forget half of it, the oldest first."),
]
Keep = Annotated[
    int, _flag("--keep", text="Tokens at the start that a context shift keeps; -1: the whole prompt.", min=-1)
]
IgnoreEos = Annotated[bool, _flag("--ignore-eos", text="Go on when the model says that it has finished.")]

# --- sampling -----------------------------------------------------------------------------------------------

_SAMPLING = "Sampling"

Temp = Annotated[
    float, _flag("--temp", "--temperature", text="0: always the likeliest token.", panel=_SAMPLING)
]
TopK = Annotated[int, _flag("--top-k", text="Choose among the k likeliest; 0: all.", panel=_SAMPLING)]
TopP = Annotated[
    float, _flag("--top-p", text="Choose among the likeliest that make up p; 1: all.", panel=_SAMPLING)
]
MinP = Annotated[
    float,
    _flag(
        "--min-p", text="Drop what is less than p times as likely as the best; 0: nothing.", panel=_SAMPLING
    ),
]
Typical = Annotated[
    float,
    _flag(
        "--typical",
        "--typical-p",
        text="Choose among the most typical that make up p; 1: all.",
        panel=_SAMPLING,
    ),
]
RepeatPenalty = Annotated[
    float, _flag("--repeat-penalty", text="Divide the odds of what was just said; 1: off.", panel=_SAMPLING)
]
RepeatLastN = Annotated[
    int,
    _flag(
        "--repeat-last-n", text="How far the penalties look back; 0: off, -1: to the start.", panel=_SAMPLING
    ),
]
PresencePenalty = Annotated[
    float, _flag("--presence-penalty", text="Subtract for having been said; 0: off.", panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float, _flag("--frequency-penalty", text="Subtract for each time it was said; 0: off.", panel=_SAMPLING)
]
Seed = Annotated[
    int,
    _flag(
        "-s",
        "--seed",
        text="The same seed gives the same answer; -1: another one each time.",
        panel=_SAMPLING,
    ),
]

# --- output -------------------------------------------------------------------------------------------------

_OUTPUT = "Output"

DisplayPrompt = Annotated[
    bool | None,
    _flag(
        "--display-prompt/--no-display-prompt",
        text="Print a text before its continuation. Default: on a terminal.",
        panel=_OUTPUT,
        show_default=False,
    ),
]
Json = Annotated[
    bool, _flag("--json", text="One JSON object on standard output, nothing else.", panel=_OUTPUT)
]
Debug = Annotated[bool, _flag("--debug", text="Show where an error comes from.", panel=_OUTPUT)]
