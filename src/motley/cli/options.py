"""The flags of all commands. A flag that llama.cpp also has has the same name.

Flags that several commands share are grouped in `loading.py` and `sampling.py`: add one here and there, and every
command that takes the group has it.
"""

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
        metavar="MODEL",
        help="A .gguf file; of a model in several files, the first one. Default: the bundled model.",
    ),
]
ModelFlag = Annotated[
    Path | None, _flag("-m", "--model", text="The same as MODEL.", panel=_MODEL, metavar="FILE")
]
HfRepo = Annotated[
    str | None,
    _flag(
        "-hf",
        "-hfr",
        "--hf-repo",
        text="A model on Hugging Face, downloaded when it is first used. QUANT is Q4_K_M unless you name another.",
        panel=_MODEL,
        metavar="USER/REPO[:QUANT]",
    ),
]
HfFile = Annotated[
    str | None,
    _flag("-hff", "--hf-file", text="The file of the repository to use.", panel=_MODEL, metavar="FILE"),
]
HfToken = Annotated[
    str | None,
    _flag("-hft", "--hf-token", text="Access token. Default: HF_TOKEN.", panel=_MODEL, metavar="TOKEN"),
]
Offline = Annotated[
    bool, _flag("--offline", text="Use only models that are already downloaded.", panel=_MODEL)
]
CtxSize = Annotated[
    int,
    _flag(
        "-c",
        "--ctx-size",
        text="Context size in tokens. Default: the model's own, or as much of it as fits (perplexity and kv-quality: "
        "512; bench: what the test needs).",
        panel=_MODEL,
        metavar="N",
        min=0,
    ),
]
BatchSize = Annotated[
    int | None,
    _flag(
        "-b",
        "--batch-size",
        text="Prompt tokens per step. Default: 2048 on GPUs, 512 on a CPU.",
        panel=_MODEL,
        metavar="N",
        min=1,
    ),
]
UBatchSize = Annotated[
    int | None,
    _flag(
        "-ub",
        "--ubatch-size",
        text="The same as -b; if both are given, the smaller number is used.",
        panel=_MODEL,
        metavar="N",
        min=1,
    ),
]
Parallel = Annotated[
    int | None,
    _flag(
        "-np",
        "--parallel",
        text="Sequences that share the cache at the same time. Default: one; serve: 8 on a CPU, 128 on GPUs.",
        panel=_MODEL,
        metavar="N",
        min=1,
    ),
]
Backend = Annotated[
    str,
    _flag(
        "--backend",
        text="What computes on the CPU: cpu (native kernels), cpu-exact (the same with float32 activations), reference "
        "(slow, but exact by definition) or auto (the fastest available).",
        panel=_MODEL,
        metavar="NAME",
    ),
]
Threads = Annotated[
    int | None,
    _flag(
        "-t",
        "--threads",
        text="CPU threads, shared by all devices. Default: one per core.",
        panel=_MODEL,
        metavar="N",
        min=1,
    ),
]
Verbose = Annotated[
    bool,
    _flag(
        "-v",
        "--verbose",
        text="Show which kernels were chosen and compiled, how weights are read, and statistics after each answer.",
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
        text="Comma-separated devices that share the model: cpu, cuda:0. auto: all GPUs, or the CPU if there are none. "
        "The same device twice makes two virtual devices. cpu:0-7, cpu:0+2+4 and cpu:node0 use those cores only, with "
        "one thread on each. cpu@10.0.0.2:29400 is a device of a worker process (motley worker). Parentheses make "
        "groups, which share layers and split tensors within: (cuda:0,cuda:1),(cpu,cpu)@10.0.0.2. All devices may be "
        "of workers.",
        panel=_CREW,
        metavar="NAMES",
    ),
]
GpuLayers = Annotated[
    str | None,
    _flag(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        text="Layers on the GPUs; the CPU takes the rest. Default: all of them.",
        panel=_CREW,
        metavar="N",
    ),
]
MainGpu = Annotated[
    int | None,
    _flag(
        "-mg",
        "--main-gpu",
        text="Use only this GPU, unless the model is split over several.",
        panel=_CREW,
        metavar="N",
        min=0,
    ),
]
SplitMode = Annotated[
    str | None,
    _flag(
        "-sm",
        "--split-mode",
        text="none: use the first device only; layer: give each device whole layers; tensor: give each device a part "
        "of every tensor. Default: layer, if --device names several devices. Not allowed with groups of devices.",
        panel=_CREW,
        metavar="MODE",
    ),
]
TensorSplit = Annotated[
    str | None,
    _flag(
        "-ts",
        "--tensor-split",
        text="Comma-separated proportions, such as 3,1. Default: in proportion to --device-memory, or equal.",
        panel=_CREW,
        metavar="N,N,…",
    ),
]
DeviceMemory = Annotated[
    str | None,
    _flag(
        "--device-memory",
        text="Maximum memory of each device, comma-separated: 2GiB,1GiB.",
        panel=_CREW,
        metavar="SIZES",
    ),
]
SplitExperts = Annotated[
    str,
    _flag(
        "--split-experts",
        text="How tensor mode distributes experts. ffn: each device gets a part of every expert; whole: each device "
        "gets whole experts; auto: the way that is closer to the proportions.",
        panel=_CREW,
        metavar="WAY",
    ),
]

SecretFile = Annotated[
    Path | None,
    _flag(
        "--secret-file",
        text="The secret that this process shares with workers on other hosts. Only you may have access to the file.",
        panel=_CREW,
        metavar="FILE",
    ),
]
NCpuMoe = Annotated[
    str | None,
    _flag(
        "-ncmoe",
        "--n-cpu-moe",
        text="Keep the routed experts of the first N layers on the CPU, everything else on the other devices; auto: "
        "of as few layers as possible, so that the rest fits. If all devices are CPUs, the last one has these experts.",
        panel=_CREW,
        metavar="N",
    ),
]
CpuMoe = Annotated[
    bool, _flag("-cmoe", "--cpu-moe", text="The same as --n-cpu-moe with all layers.", panel=_CREW)
]
ExpertSplit = Annotated[
    str | None,
    _flag(
        "--expert-split",
        text="With --n-cpu-moe: proportions in which devices share these experts, such as 1,3. Default: all of them on "
        "the CPU.",
        panel=_CREW,
        metavar="N,N,…",
    ),
]

Wire = Annotated[
    str,
    _flag(
        "--wire",
        text="Type of the activations that processes send to each other: f32 (default on one machine), f16 (default "
        "between machines) or q8.",
        panel=_CREW,
        metavar="TYPE",
    ),
]
OnLoss = Annotated[
    str,
    _flag(
        "--on-loss",
        text="When a worker is lost: wait until it is back and compute its requests again, or fail.",
        panel=_CREW,
        metavar="wait|fail",
    ),
]

# --- how much of the model ----------------------------------------------------------------------------------

NExpertUsed = Annotated[
    int | None,
    _flag(
        "--n-expert-used",
        text="Experts used per token. Default: as the model file says.",
        panel=_MODEL,
        metavar="N",
    ),
]
NLayerExit = Annotated[
    int | None,
    _flag(
        "--n-layer-exit",
        text="Run only the first N layers, then the output. Default: all layers.",
        panel=_MODEL,
        metavar="N",
    ),
]

# --- speculation --------------------------------------------------------------------------------------------

_SPECULATION = "Speculation"

Spec = Annotated[
    str | None,
    _flag(
        "--spec",
        "--spec-type",
        text="Guess the next tokens and check several in one step; the text stays the same. auto: lookup, while it "
        "helps; off; or comma-separated: lookup (in the text itself), lookahead, draft (needs -md), exit (the first "
        "layers), mtp (the file's prediction layer). "
        "Default: auto, and draft with -md.",
        panel=_SPECULATION,
        metavar="NAMES",
        show_default=False,
    ),
]
DraftMax = Annotated[
    int | None,
    _flag(
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        text="Guess at most this many tokens at a time. Default: 15.",
        panel=_SPECULATION,
        metavar="N",
        show_default=False,
    ),
]
DraftMin = Annotated[
    int | None,
    _flag(
        "--draft-min",
        "--draft-n-min",
        "--spec-draft-n-min",
        text="Use no guess with fewer tokens than this. Default: 0.",
        panel=_SPECULATION,
        metavar="N",
        show_default=False,
    ),
]
ModelDraft = Annotated[
    Path | None,
    _flag(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        text="A smaller model with the same vocabulary, for --spec draft.",
        panel=_SPECULATION,
        metavar="FILE",
        show_default=False,
    ),
]
LookaheadFlag = Annotated[
    str | None,
    _flag(
        "--lookahead",
        text="For --spec lookahead: tokens in the window and in an n-gram, n-grams kept for a token. Default: 7,5,7.",
        panel=_SPECULATION,
        metavar="W,N,G",
        show_default=False,
    ),
]
LookupAnswers = Annotated[
    int,
    _flag(
        "--lookup-answers",
        text="Also guess from this many tokens of finished answers of the same user (cache_salt). "
        "The speed of an answer then reveals their content. Default: 0.",
        panel=_SPECULATION,
        metavar="N",
        show_default=False,
    ),
]
DraftLayers = Annotated[
    int | None,
    _flag(
        "--draft-layers",
        text="Layers that guess with --spec exit. Default: half of the model's.",
        panel=_SPECULATION,
        metavar="N",
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
StateType = Annotated[
    str,
    _flag(
        "--state-type",
        text="Type of recurrent states (Qwen3-Next): f32, or bf16 for half the memory.",
        panel=_CACHE,
        metavar="TYPE",
    ),
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
        text="Tokens per block: a power of two; on a GPU at least 16.",
        panel=_CACHE,
        metavar="N",
        min=1,
    ),
]
KvCacheTokens = Annotated[
    int | None,
    _flag(
        "--kv-cache-tokens",
        text="Maximum number of tokens in the cache, for all requests together. It does not depend on -c.",
        panel=_CACHE,
        metavar="N",
        min=1,
    ),
]
KvCacheBytes = Annotated[
    str | None,
    _flag(
        "--kv-cache-bytes",
        text="Maximum memory of the cache, over all devices: 2GiB.",
        panel=_CACHE,
        metavar="SIZE",
    ),
]
KvDemandPaged = Annotated[
    bool,
    _flag(
        "--kv-cache-demand-paged",
        text="Allocate memory when blocks are first written, and release it when they are freed.",
        panel=_CACHE,
    ),
]
PrefixCache = Annotated[
    bool,
    _flag(
        "--prefix-cache/--no-prefix-cache",
        text="Keep the KV cache of earlier prompts, until its memory is needed, and reuse it for equal beginnings.",
        panel=_CACHE,
    ),
]

# --- the text -----------------------------------------------------------------------------------------------

Prompt = Annotated[
    str | None, _flag("-p", "--prompt", text="The prompt, or the text to read.", metavar="TEXT")
]
File = Annotated[
    Path | None,
    _flag("-f", "--file", text="Read the text from a file; -: from standard input.", metavar="FILE"),
]
Escape = Annotated[
    bool, _flag("-e", "--escape", text=r"Read \n, \t, \\ and other escapes in -p, -sys and -r.")
]
Chunks = Annotated[int | None, _flag("--chunks", text="Use only the first N chunks.", metavar="N", min=1)]
SystemPrompt = Annotated[
    str | None,
    _flag("-sys", "--system-prompt", text="How the model should behave in a chat.", metavar="TEXT"),
]
Conversation = Annotated[
    bool | None,
    _flag(
        "-cnv/-no-cnv",
        "--conversation/--no-conversation",
        text="Use the model's chat template and keep chatting after -p; or only continue the text. "
        "Default: one answer to -p, through the template if the model has one.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    _flag(
        "--chat-template",
        text="Use this chat template: a name in the model file, a common one such as chatml or "
        "llama3, or a file with Jinja text. Default: the model's own.",
        metavar="NAME",
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    _flag("--chat-template-file", text="The same, always from a file.", metavar="FILE"),
]
PromptCache = Annotated[
    Path | None,
    _flag(
        "--prompt-cache",
        text="Read the KV cache of the prompt from this file if it exists, and write it afterwards.",
        metavar="FILE",
    ),
]
PromptCacheAll = Annotated[
    bool, _flag("--prompt-cache-all", text="Also write the answer's part of the cache.")
]
PromptCacheReadOnly = Annotated[bool, _flag("--prompt-cache-ro", text="Never write the file.")]
SingleTurn = Annotated[bool, _flag("-st", "--single-turn", text="Exit after one answer.")]
Predict = Annotated[
    int | None,
    _flag(
        "-n",
        "--predict",
        "--n-predict",
        text="Maximum number of tokens to generate; -1: only the context limits it. Default: no limit; 4096 for each "
        "answer in the chat of motley run.",
        metavar="N",
    ),
]
ReversePrompt = Annotated[
    list[str] | None,
    _flag("-r", "--reverse-prompt", text="Stop at this text. Can be repeated.", metavar="TEXT"),
]
ContextShift = Annotated[
    bool,
    _flag(
        "--context-shift/--no-context-shift",
        text="When the context is full, drop the older half of it and continue.",
    ),
]
Keep = Annotated[
    int,
    _flag(
        "--keep",
        text="Tokens at the start that --context-shift keeps; -1: the whole prompt.",
        metavar="N",
        min=-1,
    ),
]
IgnoreEos = Annotated[bool, _flag("--ignore-eos", text="Continue when the model says that it has finished.")]

# --- sampling -----------------------------------------------------------------------------------------------

_SAMPLING = "Sampling"

Temp = Annotated[
    float,
    _flag(
        "--temp",
        "--temperature",
        text="Randomness; 0: always the likeliest token.",
        panel=_SAMPLING,
        metavar="X",
    ),
]
TopK = Annotated[
    int, _flag("--top-k", text="Choose among the N likeliest tokens; 0: all.", panel=_SAMPLING, metavar="N")
]
TopP = Annotated[
    float,
    _flag(
        "--top-p",
        text="Choose among the likeliest tokens that together have this probability; 1: all.",
        panel=_SAMPLING,
        metavar="P",
    ),
]
MinP = Annotated[
    float,
    _flag(
        "--min-p",
        text="Drop tokens less than P times as likely as the best; 0: none.",
        panel=_SAMPLING,
        metavar="P",
    ),
]
Typical = Annotated[
    float,
    _flag(
        "--typical",
        "--typical-p",
        text="Choose among the most typical tokens that together have this probability; 1: all.",
        panel=_SAMPLING,
        metavar="P",
    ),
]
RepeatPenalty = Annotated[
    float,
    _flag(
        "--repeat-penalty",
        text="Make recent tokens less likely; 1: off.",
        panel=_SAMPLING,
        metavar="X",
    ),
]
RepeatLastN = Annotated[
    int,
    _flag(
        "--repeat-last-n",
        text="How many tokens the penalties look back; 0: off, -1: the whole context.",
        panel=_SAMPLING,
        metavar="N",
    ),
]
PresencePenalty = Annotated[
    float,
    _flag(
        "--presence-penalty",
        text="Subtract this from the logits of tokens that occurred; 0: off.",
        panel=_SAMPLING,
        metavar="X",
    ),
]
FrequencyPenalty = Annotated[
    float,
    _flag(
        "--frequency-penalty",
        text="Subtract this for each time that a token occurred; 0: off.",
        panel=_SAMPLING,
        metavar="X",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    _flag(
        "-l",
        "--logit-bias",
        text="Make a token more or less likely by its id: 15043+1, 15043-2.5, or 15043-inf to ban it. Can be repeated.",
        panel=_SAMPLING,
        metavar="ID±X",
    ),
]
Seed = Annotated[
    int,
    _flag(
        "-s",
        "--seed",
        text="The same seed gives the same answer; -1: a different one each time.",
        panel=_SAMPLING,
        metavar="N",
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
    ),
]
Markdown = Annotated[
    bool, _flag("--markdown", text="Render Markdown in answers, on a terminal.", panel=_OUTPUT)
]
Json = Annotated[
    bool,
    _flag(
        "--json",
        text="Print one JSON object to standard output, also for an error.",
        panel=_OUTPUT,
    ),
]
Debug = Annotated[bool, _flag("--debug", text="Show where an error comes from.", panel=_OUTPUT)]
