"""Flags of llama.cpp that have no effect in Motley. They are accepted, and one notice says why they do nothing."""

from __future__ import annotations

from dataclasses import dataclass

SWITCH_WORDS = frozenset({"on", "off", "auto", "0", "1", "true", "false"})


@dataclass(frozen=True)
class UnusedFlag:
    """A flag without effect. `takes_value`: it is followed by a value; `is_switch`: perhaps by on, off or auto."""

    reason: str
    takes_value: bool = False
    is_switch: bool = False


_UNUSED_BY_NAMES: tuple[tuple[str, UnusedFlag], ...] = (
    ("-fa --flash-attn", UnusedFlag("attention is always fused", is_switch=True)),
    ("--mmap --no-mmap", UnusedFlag("Motley decides which weights stay in the mapped file")),
    ("--mlock", UnusedFlag("memory is not locked")),
    ("-dio --direct-io -ndio --no-direct-io", UnusedFlag("files are always mapped")),
    ("--numa", UnusedFlag("--device cpu:node0,cpu:node1 does this", takes_value=True)),
    ("-cb --cont-batching -nocb --no-cont-batching", UnusedFlag("batching is always continuous")),
    ("-kvu --kv-unified -no-kvu --no-kv-unified", UnusedFlag("sequences always share one cache")),
    ("-nkvo --no-kv-offload -kvo --kv-offload", UnusedFlag("the cache is on the devices of its layers")),
    ("-dt --defrag-thold", UnusedFlag("a paged cache does not fragment", takes_value=True)),
    ("-tb --threads-batch", UnusedFlag("-t is for prompts, too", takes_value=True)),
    ("--prio --prio-batch --poll --poll-batch", UnusedFlag("threads set this themselves", takes_value=True)),
    (
        "-C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch",
        UnusedFlag("--device cpu:0-7 chooses cores", takes_value=True),
    ),
    ("--warmup --no-warmup", UnusedFlag("there is no warm-up run")),
    ("--perf --no-perf", UnusedFlag("--verbose shows speeds")),
    ("--jinja --no-jinja", UnusedFlag("chat templates are always Jinja")),
    ("-co --color", UnusedFlag("colours depend on the terminal and on NO_COLOR", is_switch=True)),
    (
        "-i --interactive -if --interactive-first -ml --multiline-input --simple-io",
        UnusedFlag("without -p there is a chat"),
    ),
    (
        "--log-disable --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps",
        UnusedFlag("there is no log"),
    ),
    ("--log-file -lv --verbosity --log-verbosity", UnusedFlag("there is no log", takes_value=True)),
    ("--log-colors", UnusedFlag("there is no log", is_switch=True)),
    ("--repack --no-repack -nr", UnusedFlag("Motley decides which weights are repacked")),
    ("--check-tensors", UnusedFlag("files are always checked")),
    ("--no-escape", UnusedFlag("escapes are only read with -e")),
    ("--swa-full", UnusedFlag("windows only keep what they need")),
    (
        "--draft-p-min --spec-draft-p-min --draft-p-split --spec-draft-p-split",
        UnusedFlag("drafts are as long as it pays", takes_value=True),
    ),
    (
        "-cd --ctx-size-draft -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -devd --device-draft "
        "--spec-draft-device -ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft "
        "--spec-draft-type-v -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
        "--spec-draft-threads-batch",
        UnusedFlag("a draft model has the settings of the model", takes_value=True),
    ),
    (
        "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-ngram-check-rate",
        UnusedFlag("the longest match wins, from three tokens on", takes_value=True),
    ),
)
UNUSED: dict[str, UnusedFlag] = {name: flag for names, flag in _UNUSED_BY_NAMES for name in names.split()}
