"""The flags for devices, and for the split of a model over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from motley.cli import torchrun
from motley.cli.options.flag import flag
from motley.cli.options.model import CtxSize
from motley.cli.report import say
from motley.errors import ConfigError

if TYPE_CHECKING:
    from motley.runtime.crew import Crew

_ALL_LAYERS = 2**31 - 1  # more than any model has

_PANEL = "Devices"  # of --help

Device = Annotated[
    str,
    flag(
        "-dev",
        "--device",
        text="Comma-separated devices that share the model: cpu, cuda:0. auto: all GPUs, or the CPU if there are none. "
        "The same device twice makes two virtual devices. cpu:0-7, cpu:0+2+4 and cpu:node0 use those cores only, with "
        "one thread on each. cpu@10.0.0.2:29400 is a device of a worker process (motley worker). Parentheses make "
        "groups, which share layers and split tensors within: (cuda:0,cuda:1),(cpu,cpu)@10.0.0.2. All devices may be "
        "of workers.",
        panel=_PANEL,
        metavar="NAMES",
    ),
]
GpuLayers = Annotated[
    str | None,
    flag(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        text="Layers on the GPUs; the CPU takes the rest. Default: all of them.",
        panel=_PANEL,
        metavar="N",
    ),
]
MainGpu = Annotated[
    int | None,
    flag(
        "-mg",
        "--main-gpu",
        text="Use only this GPU, unless the model is split over several.",
        panel=_PANEL,
        metavar="N",
        min=0,
    ),
]
SplitMode = Annotated[
    str | None,
    flag(
        "-sm",
        "--split-mode",
        text="none: use the first device only; layer: give each device whole layers; tensor: give each device a part "
        "of every tensor. Default: layer, if --device names several devices. Not allowed with groups of devices.",
        panel=_PANEL,
        metavar="MODE",
    ),
]
TensorSplit = Annotated[
    str | None,
    flag(
        "-ts",
        "--tensor-split",
        text="Comma-separated proportions, such as 3,1. Default: in proportion to --device-memory, or equal.",
        panel=_PANEL,
        metavar="N,N,…",
    ),
]
DeviceMemory = Annotated[
    str | None,
    flag(
        "--device-memory",
        text="Maximum memory of each device, comma-separated: 2GiB,1GiB.",
        panel=_PANEL,
        metavar="SIZES",
    ),
]
SplitExperts = Annotated[
    str,
    flag(
        "--split-experts",
        text="How tensor mode distributes experts. ffn: each device gets a part of every expert; whole: each device "
        "gets whole experts; auto: the way that is closer to the proportions.",
        panel=_PANEL,
        metavar="WAY",
    ),
]
SecretFile = Annotated[
    Path | None,
    flag(
        "--secret-file",
        text="The secret that this process shares with workers on other hosts. Only you may have access to the file.",
        panel=_PANEL,
        metavar="FILE",
    ),
]
NCpuMoe = Annotated[
    str | None,
    flag(
        "-ncmoe",
        "--n-cpu-moe",
        text="Keep the routed experts of the first N layers on the CPU, everything else on the other devices; auto: "
        "of as few layers as possible, so that the rest fits. If all devices are CPUs, the last one has these experts.",
        panel=_PANEL,
        metavar="N",
    ),
]
CpuMoe = Annotated[
    bool, flag("-cmoe", "--cpu-moe", text="The same as --n-cpu-moe with all layers.", panel=_PANEL)
]
ExpertSplit = Annotated[
    str | None,
    flag(
        "--expert-split",
        text="With --n-cpu-moe: proportions in which devices share these experts, such as 1,3. Default: all of them on "
        "the CPU.",
        panel=_PANEL,
        metavar="N,N,…",
    ),
]
Wire = Annotated[
    str,
    flag(
        "--wire",
        text="Type of the activations that processes send to each other: f32 (default on one machine), f16 (default "
        "between machines) or q8.",
        panel=_PANEL,
        metavar="TYPE",
    ),
]
OnLoss = Annotated[
    str,
    flag(
        "--on-loss",
        text="When a worker is lost: wait until it is back and compute its requests again, or fail.",
        panel=_PANEL,
        metavar="wait|fail",
    ),
]


@dataclass(frozen=True)
class DeviceOptions:
    """The flags for devices, and for the split of a model over them."""

    ctx_size: CtxSize = 0
    device: Device = "auto"
    gpu_layers: GpuLayers = None
    main_gpu: MainGpu = None
    split_mode: SplitMode = None
    tensor_split: TensorSplit = None
    device_memory: DeviceMemory = None
    split_experts: SplitExperts = "auto"
    secret_file: SecretFile = None
    wire: Wire = "auto"
    on_loss: OnLoss = "wait"
    n_cpu_moe: NCpuMoe = None
    cpu_moe: CpuMoe = False
    expert_split: ExpertSplit = None

    def crew(self, backend: str = "auto") -> tuple[Crew, str | None]:
        """The devices, and the sentence about them if they were left to Motley."""
        from motley.runtime.defaults import chosen_crew  # here for the same reason as in `load`

        return chosen_crew(
            self.device,
            self.split_mode,
            self.tensor_split,
            self.device_memory,
            self.split_experts,
            self.layers_apart,
            self.expert_split,
            backend=backend,
        )

    @property
    def layers_apart(self) -> int | str | None:
        """The number of layers of --n-cpu-moe (--cpu-moe: all), "auto", or None."""
        n_layers = self.n_cpu_moe
        if n_layers is not None and self.cpu_moe:
            raise ConfigError(f"two numbers: --n-cpu-moe {n_layers} and --cpu-moe", hint="give one of them")
        if self.cpu_moe:
            return _ALL_LAYERS
        if n_layers is None or n_layers == "auto":
            return n_layers
        if not n_layers.isdecimal():
            raise ConfigError(
                f"--n-cpu-moe {n_layers!r} is not a number of layers", hint="for example 20, or auto"
            )
        return min(int(n_layers), _ALL_LAYERS)

    def placed(self, path: Path) -> Self:
        """The same with -ngl and -mg as devices and proportions, for the model in `path`. Under torchrun, with the
        devices of all ranks.
        """
        if torchrun.is_active():
            crew = torchrun.gather(self.device)
            say(f"torchrun: {crew.devices}")
            return replace(self, device=crew.devices, secret_file=crew.secret_file)
        from motley.cli.placement import (  # here for the same reason as in `load`
            Places,
            experts_notices,
            place_layers,
        )

        asked = Places(self.device, self.split_mode, self.tensor_split)
        places = place_layers(path, asked, self.gpu_layers, self.main_gpu)
        notices = experts_notices(places, self.layers_apart, self.expert_split, self.split_experts)
        for notice in ([] if places.notice is None else [places.notice]) + notices:
            say(f"note: {notice}")
        return replace(
            self,
            device=places.device,
            split_mode=places.split_mode,
            tensor_split=places.tensor_split,
            gpu_layers=None,
            main_gpu=None,
        )
