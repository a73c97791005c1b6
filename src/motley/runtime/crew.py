"""The crew: which devices share a model, how much memory each may use, and in what proportion they share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from motley.backends import DeviceOffer
from motley.errors import ConfigError, DeviceError
from motley.integers import as_int
from motley.runtime.cores import parse_cores
from motley.runtime.device_names import parse_devices
from motley.split.apart import ExpertsApart
from motley.split.lent_layers import LentLayers
from motley.split.placement import AUTO, EXPERT_SPLITS, LAYER, NONE, SPLIT_MODES, TENSOR
from motley.units import parse_bytes

_REMOTE_NAME = re.compile(r"cpu(:[0-9a-z+-]+)?|cuda:[0-9]{1,3}")
_MAX_GPU_THREADS = 8  # without a CPU in the crew
_ALL_LAYERS = 2**31  # more than any model has


@dataclass(frozen=True)
class Device:
    """A device of the crew. Several devices may have the same name: virtual devices on the same hardware."""

    name: str
    memory: int | None = None  # bytes it may use; None: as much as there is
    cores: tuple[int, ...] = ()  # one for each of its threads, which are pinned to it; empty: any core
    host: str | None = None  # address and port of the worker process that has it; None: this process
    offer: DeviceOffer | None = None  # what that process says of it; None: it was not asked

    @property
    def full_name(self) -> str:
        """The name as the user gives it: `cpu`, `cuda:0@10.0.0.2:29400`."""
        return self.name if self.host is None else f"{self.name}@{self.host}"

    @property
    def remote_offer(self) -> DeviceOffer | None:
        """The worker's description of a device of another process; None for devices of this process."""
        return None if self.host is None else self.offer or DeviceOffer()

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
    apart: ExpertsApart | None = None  # experts that other devices have than the rest of their layers
    # Devices that split the tensors of the same layers; groups share layers. Each device is in one. Empty: no groups,
    # `mode` is that of all devices.
    groups: tuple[tuple[int, ...], ...] = ()
    lent: LentLayers | None = None  # layers whose products another device computes in batches of many rows

    def __len__(self) -> int:
        return len(self.devices)

    def label(self, index: int) -> str:
        """The name of a device in messages: `cpu`, or `cpu#1` if several devices have this name."""
        name = self.devices[index].full_name
        is_alone = sum(device.full_name == name for device in self.devices) == 1
        return name if is_alone else f"{name}#{index}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The workers of other processes, in the order of their first devices."""
        return tuple(dict.fromkeys(device.host for device in self.devices if device.host is not None))

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of each device's process: 0 is this one, then the workers in the order of `hosts`."""
        hosts = self.hosts
        return tuple(0 if device.host is None else 1 + hosts.index(device.host) for device in self.devices)

    def members(self, rank: int) -> tuple[int, ...]:
        """The devices of a process."""
        return tuple(device for device, owner in enumerate(self.owners) if owner == rank)

    @property
    def sharing(self) -> tuple[Device, ...]:
        """The devices that have a part of the model."""
        apart = (Fraction(0),) * len(self) if self.apart is None else self.apart.shares
        shares = zip(self.devices, self.shares, apart, strict=True)
        return tuple(device for device, own, experts in shares if own or experts)

    @property
    def borrower(self) -> int | None:
        """The device that multiplies by other devices' weights in batches of `min_lent_rows` or more; None: none."""
        if self.lent is not None:
            return self.lent.borrower
        return None if self.apart is None else self.apart.borrower

    @property
    def lender(self) -> int | None:
        """The device whose weights the borrower multiplies by; None: there is no borrower."""
        if self.lent is not None:
            return self.lent.owner
        return None if self.apart is None or self.apart.borrower is None else self.apart.owner

    @property
    def min_lent_rows(self) -> int:
        return self.lent.min_rows if self.lent is not None else self.apart.min_rows if self.apart else 0

    @property
    def n_lent_ahead(self) -> int:
        """How many stages' weights the borrower has room for: of this one, and of those that are copied meanwhile."""
        return 4 if self.lent is not None else 2

    @property
    def local(self) -> Crew:
        """The devices of this process as a crew of their own, with all experts where their layers are.

        If they have no shares, they get equal ones.
        """
        own = self.members(0)
        if len(own) == len(self):
            return self
        shares = tuple(self.shares[device] for device in own)
        shares = shares if any(shares) else (Fraction(1),) * len(own)
        groups = tuple(tuple(map(own.index, members)) for members in self.groups if set(members) <= set(own))
        mode = self.mode if len(own) > 1 else NONE
        if len(groups) == 1 and len(own) > 1:
            mode, groups = TENSOR, ()
        return Crew(tuple(self.devices[device] for device in own), mode, shares, self.experts, None, groups)

    def threads(self, asked: int | None, members: Sequence[int] | None = None) -> list[int]:
        """The number of threads of each device: one for each of its cores. Devices without cores share the rest of
        `asked` (default: torch's number of threads) evenly, with at least one each. Beside a CPU, a GPU has one thread,
        which launches its kernels. Without one, its threads read weights, and a few of them do it faster than many: on
        16 cores, 4.3 GiB take 0.85 s with 4 or 8 threads and 1.2 s with 16.
        `members`: the devices of one process; default: all.
        """
        devices = self.devices if members is None else [self.devices[index] for index in members]
        n_bound = sum(len(device.cores) for device in devices)
        n_gpus = sum(device.is_gpu for device in devices)
        n_free = sum(not device.cores for device in devices)
        if asked is not None and not n_free:
            raise ConfigError(
                f"{asked} threads, but the devices name their cores",
                hint="each core has one thread: leave out -t",
            )
        n_threads = (asked or torch.get_num_threads()) - n_bound
        if 0 < n_gpus < len(devices):
            rest = (n_threads - n_gpus) // max(n_free - n_gpus, 1)
            return [1 if device.is_gpu else len(device.cores) or max(1, rest) for device in devices]
        rest = n_threads // max(n_free, 1)
        if n_gpus and asked is None:
            rest = min(rest, _MAX_GPU_THREADS)
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
    n_cpu_moe: int | str | None = None,
    expert_split: str | Sequence[float] | None = None,
) -> Crew:
    """A checked crew with defaults. Shares default to the memory budgets; without budgets, to equal shares.

    `n_cpu_moe`: the routed experts of this many layers are on the CPU (of CPU devices: on the last one), or are shared
    out by `expert_split`; "auto": of as few layers as fit. Other weights are shared out over the other devices.

    If all devices are of other processes, this process gets a CPU device in front of them, without a share.
    """
    named = parse_devices(devices)
    names, hosts = named.names, named.hosts
    _require_known(names, hosts)
    is_asked = n_cpu_moe not in (None, 0) or expert_split is not None
    if is_asked and len(names) == 1 and names[0].startswith("cuda"):
        names.append("cpu")
        hosts.append(None)
    is_apart = is_asked and len(names) > 1
    mode, groups = _grouped_mode(named.groups, split_mode)
    mode = mode or (NONE if len(names) == 1 else TENSOR if is_apart else LAYER)
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
    shares = _shares("tensor split", tensor_split, budgets, len(names))
    memory: Sequence[int | None] = budgets or [None] * len(names)
    crew = tuple(map(Device, names, memory, _cores(names, hosts), hosts))
    holders = _expert_devices(names, groups)
    apart = _apart(n_cpu_moe, expert_split, holders, len(names)) if is_asked else None
    if mode == NONE:
        if is_apart:
            raise ConfigError(
                "experts are on other devices than the rest, but split mode none uses one device",
                hint="leave out --split-mode",
            )
        return _with_reader(Crew(crew[:1], mode, (Fraction(1),)))
    if not is_apart:
        return _with_reader(Crew(crew, mode, shares, split_experts, groups=groups))
    if not _listed(tensor_split):
        shares = tuple(Fraction(0) if device in holders else share for device, share in enumerate(shares))
    return _with_reader(Crew(crew, mode, shares, split_experts, apart, groups))


def _with_reader(crew: Crew) -> Crew:
    """The crew with a CPU of this process in front, without a share, if all its devices are of other processes: rank 0
    reads the logits there. Devices of one worker that split tensors become a group, which sends nothing but logits.
    """
    if crew.members(0):
        return crew
    groups = crew.groups
    if crew.mode == TENSOR and len(crew.hosts) == 1:
        groups = (tuple(range(len(crew))),)
    if groups:
        groups = ((0,), *(tuple(device + 1 for device in members) for members in groups))
    none = Fraction(0)
    return replace(
        crew,
        devices=(Device("cpu"), *crew.devices),
        mode=TENSOR if crew.mode == TENSOR and not groups else LAYER,
        shares=(none, *crew.shares),
        apart=None if crew.apart is None else replace(crew.apart, shares=(none, *crew.apart.shares)),
        groups=groups,
    )


def _grouped_mode(
    groups: Sequence[tuple[int, ...]], asked: str | None
) -> tuple[str | None, tuple[tuple[int, ...], ...]]:
    """The split mode that parentheses around devices mean, and the groups if there are several of several devices.

    Without parentheses: the requested mode.
    """
    if not groups or (len(groups) == 1 and len(groups[0]) == 1):
        return asked, ()
    meant = TENSOR if len(groups) == 1 else LAYER
    if asked not in (None, NONE, meant):
        raise ConfigError(
            f"split mode {asked}, but parentheses mean: tensors are split within groups, layers between them",
            hint="leave out --split-mode, or the parentheses",
        )
    is_nested = len(groups) > 1 and any(len(members) > 1 for members in groups)
    return asked or meant, tuple(groups) if is_nested and asked != NONE else ()


def _expert_devices(names: Sequence[str], groups: Sequence[tuple[int, ...]]) -> list[int]:
    """The devices for experts that are apart: the CPUs beside GPUs; otherwise the last device. Of groups: of each that
    has several devices.
    """
    holders = []
    for members in groups or [tuple(range(len(names)))]:
        cpus = [device for device in members if names[device].startswith("cpu")]
        if len(members) > 1:
            holders += cpus if len(cpus) < len(members) and cpus else [members[-1]]
    return holders


def _apart(
    n_cpu_moe: int | str | None,
    expert_split: str | Sequence[float] | None,
    holders: Sequence[int],
    n_devices: int,
) -> ExpertsApart:
    if expert_split is not None:
        shares = _shares("expert split", expert_split, (), n_devices)
    else:
        shares = tuple(Fraction(index in holders) for index in range(n_devices))
    if n_cpu_moe == AUTO:
        return ExpertsApart(None, shares)
    if n_cpu_moe is None:  # only the proportions are given
        return ExpertsApart(_ALL_LAYERS, shares)
    n_layers = as_int(n_cpu_moe)
    if n_layers is None or n_layers < 0:
        raise ConfigError(
            f"n_cpu_moe is {n_cpu_moe!r:.60}", hint="n_cpu_moe must be a number of layers, or auto"
        )
    return ExpertsApart(n_layers, shares)


def _require_known(names: Sequence[str], hosts: Sequence[str | None]) -> None:
    known = known_devices()
    if not names:
        raise DeviceError("no devices were named", hint=f"there are: {', '.join(known)}")
    for name, host in zip(names, hosts, strict=True):
        if host is not None and not _REMOTE_NAME.fullmatch(name):
            raise DeviceError(f"unknown device {name!r} of {host}", hint="a worker has cpu, cuda:0, …")
        if host is None and name not in known and not name.startswith("cpu:"):
            blind = "; torch sees no GPU" if name.startswith("cuda") and known == ("cpu",) else ""
            raise DeviceError(f"unknown device {name!r}", hint=f"there are: {', '.join(known)}{blind}")


def device_cores(name: str) -> tuple[int, ...]:
    """The cores in a device's name, such as `cpu:0-7`, on this machine; empty: any."""
    return parse_cores(name.removeprefix("cpu:")) if name.startswith("cpu:") else ()


def _cores(names: Sequence[str], hosts: Sequence[str | None]) -> list[tuple[int, ...]]:
    """The cores of each device of this machine, from names such as `cpu:0-7`.

    Two devices may not share a core: each would wait in collectives while the other needs the core.
    """
    cores = [device_cores(name) if host is None else () for name, host in zip(names, hosts, strict=True)]
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
    what: str, asked: str | Sequence[float] | None, budgets: Sequence[int], n_devices: int
) -> tuple[Fraction, ...]:
    values = _listed(asked)
    if not values:
        return tuple(Fraction(b) for b in budgets) or (Fraction(1),) * n_devices
    try:
        # Exponents go through float: a huge one becomes infinity, not an integer of a million digits.
        shares = tuple(Fraction(float(v)) if "e" in v.lower() else Fraction(v) for v in values)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise ConfigError(f"{what} {asked!r} is not a list of numbers", hint="for example 3,1") from None
    if len(shares) != n_devices:
        raise ConfigError(
            f"{what} {asked!r} has {len(shares)} numbers, but the number of devices is {n_devices}",
            hint="give one for each device; --device cpu,cpu names two",
        )
    if min(shares) < 0 or not any(shares):
        raise ConfigError(
            f"{what} {asked!r} is not a proportion", hint="numbers are 0 or more, and at least one is above 0"
        )
    return shares


def _listed(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Iterable):
        return [str(value)]
    return [str(part) for part in value]
