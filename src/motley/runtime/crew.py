"""The crew: which devices share a model, how much memory each may use, and in what proportion they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from motley.errors import ConfigError, DeviceError
from motley.runtime.cores import parse_cores
from motley.split.placement import AUTO, EXPERT_SPLITS, LAYER, NONE, SPLIT_MODES
from motley.units import parse_bytes


@dataclass(frozen=True)
class Device:
    """A device of the crew. The same name may stand for several: virtual devices on the same hardware."""

    name: str
    memory: int | None = None  # bytes it may use; None: as much as there is
    cores: tuple[int, ...] = ()  # one for each of its threads, which are pinned to it; empty: any core

    @property
    def is_gpu(self) -> bool:
        return self.name.startswith("cuda")


@dataclass(frozen=True)
class Crew:
    """Devices, how the model is split over them, and their shares (of any positive sum)."""

    devices: tuple[Device, ...]
    mode: str
    shares: tuple[Fraction, ...]
    experts: str = AUTO  # how experts are shared out in tensor mode

    def __len__(self) -> int:
        return len(self.devices)

    def label(self, index: int) -> str:
        """The name of a device in messages: `cpu`, or `cpu#1` if several devices have this name."""
        name = self.devices[index].name
        is_alone = sum(device.name == name for device in self.devices) == 1
        return name if is_alone else f"{name}#{index}"

    def threads(self, asked: int | None, members: Sequence[int] | None = None) -> list[int]:
        """The number of threads of each device: one for each of its cores. Devices without cores share the rest of
        `asked` (default: torch's number of threads) evenly, with at least one each. `members`: the devices of one
        process; default: all.
        """
        devices = self.devices if members is None else [self.devices[index] for index in members]
        n_bound = sum(len(device.cores) for device in devices)
        n_free = sum(not device.cores for device in devices)
        if asked is not None and not n_free:
            raise ConfigError(
                f"{asked} threads, but the devices name their cores",
                hint="each core has one thread: leave out -t",
            )
        rest = ((asked or torch.get_num_threads()) - n_bound) // max(n_free, 1)
        return [len(device.cores) or max(1, rest) for device in devices]


def known_devices() -> tuple[str, ...]:
    """The devices of this machine: the CPU, and the GPUs that torch sees."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ("cpu", *(f"cuda:{index}" for index in range(n_gpus)))


def make_crew(
    devices: str | Sequence[str] = "cpu",
    split_mode: str | None = None,
    tensor_split: str | Sequence[float] | None = None,
    device_memory: str | Sequence[str | int] | None = None,
    split_experts: str = AUTO,
) -> Crew:
    """A checked crew with defaults. Shares default to the memory budgets; without budgets, to equal shares."""
    names = _names(devices)
    mode = split_mode or (NONE if len(names) == 1 else LAYER)
    if mode not in SPLIT_MODES:
        raise ConfigError(f"unknown split mode {mode!r}", hint=f"there are: {', '.join(SPLIT_MODES)}")
    if split_experts not in EXPERT_SPLITS:
        raise ConfigError(
            f"unknown way to split experts {split_experts!r}", hint=f"there are: {', '.join(EXPERT_SPLITS)}"
        )
    budgets = [parse_bytes(value) for value in _listed(device_memory or ())]
    if budgets and len(budgets) != len(names):
        raise ConfigError(
            f"{len(budgets)} memory budgets for {len(names)} devices", hint="give one for each device"
        )
    shares = _shares(tensor_split, budgets, len(names))
    memory: Sequence[int | None] = budgets or [None] * len(names)
    crew = tuple(map(Device, names, memory, _cores(names)))
    return Crew(crew[:1], mode, (Fraction(1),)) if mode == NONE else Crew(crew, mode, shares, split_experts)


def _names(devices: str | Sequence[str]) -> list[str]:
    known = known_devices()
    names = ["cuda:0" if name == "cuda" else name for name in _listed(devices)]
    if not names:
        raise DeviceError("no devices were named", hint=f"there are: {', '.join(known)}")
    for name in names:
        if name not in known and not name.startswith("cpu:"):
            blind = "; torch sees no GPU" if name.startswith("cuda") and known == ("cpu",) else ""
            raise DeviceError(f"unknown device {name!r}", hint=f"there are: {', '.join(known)}{blind}")
    return names


def _cores(names: Sequence[str]) -> list[tuple[int, ...]]:
    """The cores of each device, from names such as `cpu:0-7`.

    Two devices may not share a core: each would wait in collectives while the other needs the core.
    """
    cores = [parse_cores(name.removeprefix("cpu:")) if name.startswith("cpu:") else () for name in names]
    owners: dict[int, str] = {}
    for name, own in zip(names, cores, strict=True):
        for core in own:
            if core in owners:
                raise DeviceError(
                    f"core {core} belongs to {owners[core]} and {name}", hint="give each device its own cores"
                )
            owners[core] = name
    return cores


def _shares(
    asked: str | Sequence[float] | None, budgets: Sequence[int], n_devices: int
) -> tuple[Fraction, ...]:
    values = _listed(asked)
    if not values:
        return tuple(Fraction(b) for b in budgets) or (Fraction(1),) * n_devices
    try:
        # Exponents go through float: a huge one becomes infinity, not an integer of a million digits.
        shares = tuple(Fraction(float(v)) if "e" in v.lower() else Fraction(v) for v in values)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise ConfigError(
            f"tensor split {asked!r} is not a list of numbers", hint="for example 3,1"
        ) from None
    if len(shares) != n_devices:
        raise ConfigError(
            f"tensor split {asked!r} has {len(shares)} numbers, but the number of devices is {n_devices}",
            hint="give one for each device; --device cpu,cpu names two",
        )
    if min(shares) < 0 or not any(shares):
        raise ConfigError(
            f"tensor split {asked!r} cannot be met", hint="proportions are 0 or more, and one is above 0"
        )
    return shares


def _listed(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence):
        return [str(value)]
    return [str(part) for part in value]
