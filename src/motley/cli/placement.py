"""llama.cpp's -ngl, -mg, -ncmoe and -cmoe, as Motley's devices and proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from motley.errors import ConfigError
from motley.gguf import read_spec
from motley.models import read_params
from motley.runtime.crew import known_devices
from motley.split.placement import AUTO, COLUMNS_OF_EACH, LAYER, NONE, TENSOR, WHOLE_EXPERTS

_ALL = ("all", "auto", "-1")


@dataclass(frozen=True)
class Places:
    """--device, --split-mode and --tensor-split, and the sentence about a flag without effect."""

    device: str
    split_mode: str | None
    tensor_split: str | None
    notice: str | None = None


def place_layers(path: Path, asked: Places, gpu_layers: str | None, main_gpu: int | None) -> Places:
    """The devices and shares that -ngl and -mg mean for a model. The last layers and the output are on the GPUs."""
    gpus = [name for name in known_devices() if name.startswith("cuda")]
    if gpu_layers is None and main_gpu is None:
        return asked
    n_asked = None if gpu_layers is None or gpu_layers in _ALL else _count(gpu_layers)
    named = [] if gpu_layers is None else [f"-ngl {gpu_layers}"]
    named += [] if main_gpu is None else [f"-mg {main_gpu}"]
    if not gpus or (asked.device != "auto" and "cuda" not in asked.device):
        reason = "no GPU was found" if not gpus else f"--device {asked.device} names no GPU"
        notice = f"no effect here: {', '.join(named)} ({reason})" if named != ["-ngl 0"] else None
        return replace(asked, notice=notice)
    if asked.device not in ("auto", *gpus) or (asked.device != "auto" and main_gpu is not None):
        raise ConfigError(
            f"{' '.join(named)} beside --device {asked.device}",
            hint="-ts distributes layers over the devices you name",
        )
    if asked.device in gpus:
        gpus = [asked.device]
    elif main_gpu is not None and (asked.split_mode == NONE or len(gpus) == 1 or asked.split_mode is None):
        if main_gpu >= len(gpus):
            raise ConfigError(f"-mg {main_gpu}: there is no such GPU", hint=f"there are: {', '.join(gpus)}")
        gpus = [gpus[main_gpu]]
    if n_asked == 0:
        return Places("cpu", None, None)
    n_layers = read_params(read_spec(path)).n_layers
    if n_asked is None or n_asked >= n_layers:
        return Places(gpus[0] if len(gpus) == 1 else asked.device, asked.split_mode, asked.tensor_split)
    if asked.split_mode not in (None, LAYER):
        raise ConfigError(
            f"-ngl {n_asked} of {n_layers} layers with --split-mode {asked.split_mode}",
            hint="layers are distributed by --split-mode layer",
        )
    shares = _gpu_shares(asked.tensor_split, gpus)
    counts = [n_asked * share / sum(shares) for share in shares]
    proportions = ",".join(str(n) for n in (n_layers - n_asked, *counts))
    return Places(",".join(("cpu", *gpus)), LAYER, proportions)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"-ngl {text!r} is not a number of layers", hint="for example 20, or all")
    return int(text)


def _gpu_shares(asked: str | None, gpus: Sequence[str]) -> list[Fraction]:
    try:
        shares = [Fraction(part) for part in (asked or ",".join("1" * len(gpus))).split(",")]
    except (ValueError, ZeroDivisionError):
        shares = []
    if len(shares) != len(gpus) or min(shares) < 0 or not any(shares):
        raise ConfigError(f"-ts {asked} for {len(gpus)} GPUs", hint="with -ngl, give one number for each GPU")
    return shares


def experts_notices(
    asked: Places, n_layers: int | str | None, expert_split: str | None, split_experts: str
) -> list[str]:
    """The sentences about flags for experts that have no effect: the CPU is the only device, or nothing is cut."""
    device = asked.device
    is_alone = device.startswith("cpu") and "," not in device
    if device == AUTO:
        is_alone = not any(name.startswith("cuda") for name in known_devices())
    is_apart = n_layers not in (None, 0) or expert_split is not None
    notices = []
    if is_alone and n_layers is not None:
        notices.append("no effect here: --n-cpu-moe or --cpu-moe (the CPU is the only device)")
    # Several devices of which the user says nothing more have whole layers; "auto" means tensors.
    cuts = asked.split_mode == TENSOR or (
        asked.split_mode is None and (is_apart or device == AUTO or "(" in device)
    )
    if split_experts in (COLUMNS_OF_EACH, WHOLE_EXPERTS) and (is_alone or not cuts):
        why = "the CPU is the only device" if is_alone else "only --split-mode tensor cuts experts"
        notices.append(f"no effect here: --split-experts ({why})")
    return notices
