"""The model, the crew and the cache that rank 0 asks a worker to run, as JSON, and how a worker checks it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from motley.backends import Backend, backend_for
from motley.errors import ConfigError, DeviceError, ModelError, MotleyError
from motley.gguf import ModelSpec, read_spec
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, GraphOptions, read_params
from motley.runtime.budget import host_bytes
from motley.runtime.caching import N_PENDING, CacheConfig, CachePlan, plan_layout
from motley.runtime.crew import Crew, Device, device_cores
from motley.runtime.exchange import fingerprint
from motley.runtime.hosts.messages import Limits
from motley.runtime.hosts.protocol import ProtocolError
from motley.runtime.hosts.streaming import StreamedModel
from motley.runtime.hosts.wire import WIRES
from motley.runtime.loading import weight_bytes
from motley.runtime.splitting import ModelSplit
from motley.split.apart import ExpertsApart
from motley.split.placement import EXPERT_SPLITS, SPLIT_MODES
from motley.units import show_bytes

_MAX_DEVICES, _MAX_TOKENS, _MAX_BLOCKS = 256, 2**26, 2**26


def software() -> str:
    """Versions and byte order, which must agree between the processes of a crew."""
    return f"motley {version('motley-llm')}, torch {'.'.join(torch.__version__.split('.')[:2])}, {sys.byteorder}-endian"


@dataclass(frozen=True)
class Opening:
    """The model, split and cache that a worker runs."""

    software: str
    model: str  # path of the file on rank 0's host
    fingerprint: str
    layout: str  # hash of the placement of all weights and of the cache's layout
    rank: int  # of the worker
    owners: tuple[int, ...]  # the rank of each device's process
    devices: tuple[str, ...]
    groups: tuple[int, ...]  # of each device: its group, which splits its own layers; empty: no groups
    shares: tuple[str, ...]
    mode: str
    experts: str
    apart_layers: int  # whose experts have shares of their own
    apart_shares: tuple[str, ...]  # these shares; empty: none
    backends: tuple[str, ...]  # of each device
    n_ctx: int
    k_rotation: int
    v_rotation: int
    k_type: str
    v_type: str
    block_size: int
    demand_paged: bool
    n_blocks: tuple[int, ...]  # of each group
    max_tokens: int  # of a batch
    wire: str  # how activations travel
    state_type: str  # of recurrent states
    n_state_slots: int  # 0: no layer has a recurrent state
    n_state_rings: int

    @staticmethod
    def of(
        split: ModelSplit, plan: CachePlan, backends: Sequence[Backend], max_tokens: int, wire: str
    ) -> Opening:
        """The opening for rank 1; `replace` makes those of the others."""
        crew, options, config = split.crew, split.options, plan.config
        return Opening(
            software=software(),
            model=str(split.spec.path.resolve()),
            fingerprint=fingerprint(split),
            layout=layout_hash(split, plan),
            rank=1,
            owners=crew.owners,
            devices=tuple(device.name for device in crew.devices),
            groups=tuple(number for number, members in enumerate(crew.groups) for _ in members),
            shares=tuple(map(str, crew.shares)),
            mode=crew.mode,
            experts=crew.experts,
            apart_layers=0 if crew.apart is None else crew.apart.n_layers or 0,
            apart_shares=() if crew.apart is None else tuple(map(str, crew.apart.shares)),
            backends=tuple(backend.name for backend in backends),
            n_ctx=options.n_ctx,
            k_rotation=options.k_rotation,
            v_rotation=options.v_rotation,
            k_type=config.k_type.name,
            v_type=config.v_type.name,
            block_size=config.block_size,
            demand_paged=config.demand_paged,
            n_blocks=tuple(group.n_blocks for group in plan.groups),
            max_tokens=max_tokens,
            wire=wire,
            state_type=config.state_type,
            n_state_slots=0 if plan.states is None else plan.states.n_slots,
            n_state_rings=0 if plan.states is None else plan.states.n_rings,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(given: dict[str, Any]) -> Opening:
        """Checks types and ranges; whether the model can be run so is found out by `Session`."""
        names = {field.name: str(field.type) for field in fields(Opening)}
        if given.get("software") != software():
            raise ConfigError(
                f"rank 0 has {str(given.get('software'))[:100]}, this worker has {software()}",
                hint="install the same versions on all hosts",
            )
        if set(given) != set(names):
            raise ProtocolError("an opening with other fields")
        values = {}
        for name, kind in names.items():
            value = given[name]
            if kind.startswith("tuple"):
                item = int if "int" in kind else str
                is_right = isinstance(value, list) and len(value) <= _MAX_DEVICES
                is_right = is_right and all(type(v) is item for v in value)
                value = tuple(value) if is_right else value
            else:
                is_right = type(value) is {"str": str, "int": int, "bool": bool}[kind]
            if not is_right:
                raise ProtocolError(f"an opening whose {name} is not {kind}")
            values[name] = value
        opening = Opening(**values)
        opening._check()
        return opening

    def _check(self) -> None:
        n = len(self.devices)
        ranks = set(self.owners)
        is_right = (
            n == len(self.shares) == len(self.owners) == len(self.backends)
            and ranks == set(range(len(ranks)))
            and self.rank in ranks - {0}
            and self._are_groups_right
            and self.mode in SPLIT_MODES
            and self.wire in WIRES
            and 0 <= self.n_state_slots <= _MAX_BLOCKS
            and 0 <= self.n_state_rings <= _MAX_BLOCKS
            and self.experts in EXPERT_SPLITS
            and self.apart_layers >= 0
            and len(self.apart_shares) in (0, n)
            and 1 <= self.n_ctx <= _MAX_TOKENS
            and 1 <= self.max_tokens <= _MAX_TOKENS
            and 0 <= self.k_rotation <= 1 << 16
            and 0 <= self.v_rotation <= 1 << 16
            and 1 <= self.block_size <= 1 << 16
            and len(self.n_blocks) >= 1
            and all(1 <= b <= _MAX_BLOCKS for b in self.n_blocks)
        )
        if not is_right:
            raise ProtocolError("an opening whose numbers contradict each other")

    @property
    def _are_groups_right(self) -> bool:
        """Whether groups are devices one after the other, those of each group in one process."""
        numbers = sorted(set(self.groups))
        owners = {(group, owner) for group, owner in zip(self.groups, self.owners, strict=False)}
        is_in_order = list(self.groups) == sorted(self.groups) and numbers == list(range(len(numbers)))
        return not self.groups or (
            len(self.groups) == len(self.devices) and is_in_order and len(owners) == len(numbers)
        )

    @cached_property
    def crew(self) -> Crew:
        shares = _fractions(self.shares)
        apart = ExpertsApart(self.apart_layers, _fractions(self.apart_shares)) if self.apart_shares else None
        devices = tuple(
            Device(name, None, device_cores(name) if owner == self.rank else (), None)
            for name, owner in zip(self.devices, self.owners, strict=True)
        )
        groups = tuple(
            tuple(device for device, number in enumerate(self.groups) if number == group)
            for group in sorted(set(self.groups))
        )
        return Crew(devices, self.mode, shares, self.experts, apart, groups)

    @property
    def members(self) -> tuple[int, ...]:
        """The devices of the worker."""
        return tuple(device for device, owner in enumerate(self.owners) if owner == self.rank)


def _fractions(texts: Sequence[str]) -> tuple[Fraction, ...]:
    try:
        shares = tuple(Fraction(text) for text in texts)
    except (ValueError, ZeroDivisionError):
        raise ProtocolError("an opening whose shares are no fractions") from None
    if min(shares) < 0 or not any(shares):
        raise ProtocolError("an opening whose shares are negative")
    return shares


def layout_hash(split: ModelSplit, plan: CachePlan) -> str:
    """A hash of where weights and cache layers are: all processes must compute the same."""
    states = sorted((name, str(state)) for name, state in split.placement.states.items())
    groups = [(group.window, group.layers, group.n_blocks) for group in plan.groups]
    heads = [sorted(own.items()) for own in plan.heads]
    described = repr(
        (states, groups, heads, plan.head_dim, plan.states, split.options, split.crew.mode, split.crew.groups)
    )
    return blake2b(described.encode(), digest_size=16).hexdigest()


class WorkerModel:
    """A model as a worker runs it: the same split and cache plan as on rank 0, computed here from the opening."""

    def __init__(
        self, opening: Opening, models: Path | None, stream: Callable[[], StreamedModel] | None = None
    ) -> None:
        """`models`: a folder in which the model file is looked for first. `stream`: gets the worker's parts of it from
        rank 0; default: a missing file is an error.
        """
        path = _find_model(opening.model, models)
        if path is None and stream is None:
            raise ModelError(
                f"there is no {opening.model} on this host",
                hint="copy the model file here; --models names the folder",
            )
        streamed = stream() if path is None and stream is not None else None
        try:
            self.spec: ModelSpec = read_spec(path) if path is not None else _some(streamed).read_spec()
            self._open(opening, streamed)
        finally:
            if streamed is not None:
                streamed.close()

    def _open(self, opening: Opening, streamed: StreamedModel | None) -> None:
        params = read_params(self.spec)
        options = GraphOptions(opening.n_ctx, k_rotation=opening.k_rotation, v_rotation=opening.v_rotation)
        self.split = ModelSplit(self.spec, params, opening.crew, options)
        if streamed is not None:  # it has a fingerprint in its path, and no samples of all weights
            smallest = BatchShape(1, 1)
            streamed.bring_weights(self.spec, [(d, self.split.share(d, smallest)) for d in opening.members])
        elif fingerprint(self.split) != opening.fingerprint:
            raise ModelError(
                f"{self.spec.path} is another model than rank 0's {opening.model}",
                hint="copy the model file from rank 0's host",
            )
        config = CacheConfig(
            get_cache_type(opening.k_type),
            get_cache_type(opening.v_type),
            block_size=opening.block_size,
            demand_paged=opening.demand_paged,
            state_type=opening.state_type,
        )
        self.plan = self._plan(opening, config)
        if layout_hash(self.split, self.plan) != opening.layout:
            raise DeviceError(
                "rank 0 places the model in another way",
                hint="install the same version of Motley on all hosts",
            )
        self.backends = {device: self._backend(opening, device) for device in opening.members}
        self._require_memory(opening)
        experts = params.experts
        self.limits = Limits(
            n_vocab=params.n_vocab,
            n_layers=params.n_layers,
            n_experts=0 if experts is None else experts.n_experts,
            max_tokens=opening.max_tokens,
            block_size=opening.block_size,
            n_blocks=opening.n_blocks,
            n_state_slots=opening.n_state_slots,
            n_state_rings=opening.n_state_rings,
            n_pending=N_PENDING,
        )

    def _plan(self, opening: Opening, config: CacheConfig) -> CachePlan:
        smallest = BatchShape(1, 1)
        shares = [self.split.share(device, smallest) for device in range(len(self.split.crew))]
        plan = plan_layout(self.split.graph(smallest), shares, config)
        if len(plan.groups) != len(opening.n_blocks):
            raise ProtocolError(
                f"{len(opening.n_blocks)} groups of cache layers instead of {len(plan.groups)}"
            )
        if (plan.states is not None) != (opening.n_state_slots > 0):
            raise ProtocolError("recurrent states without slots, or slots without states")
        groups = zip(plan.groups, opening.n_blocks, strict=True)
        states = plan.states
        if states is not None:
            states = replace(states, n_slots=opening.n_state_slots, n_rings=opening.n_state_rings)
        sized = tuple(replace(group, n_blocks=n) for group, n in groups)
        return replace(plan, groups=sized, states=states)

    def _backend(self, opening: Opening, device: int) -> Backend:
        name = opening.devices[device]
        backend = backend_for(name, "auto" if name.startswith("cuda") else opening.backends[device])
        if backend.name != opening.backends[device]:
            raise DeviceError(
                f"{name} has the backend {backend.name} here, but {opening.backends[device]} on rank 0",
                hint="--backend names one for all",
            )
        return backend

    def _require_memory(self, opening: Opening) -> None:
        """DeviceError if weights and cache of the CPU devices do not fit into this machine's memory."""
        members = [d for d in opening.members if not opening.devices[d].startswith("cuda")]
        needed = sum(
            weight_bytes(self.split.share(device, BatchShape(1, 1))) + self.plan.n_bytes(device)
            for device in members
        )
        memory = host_bytes()
        if memory is not None and needed > memory and not opening.demand_paged:
            raise DeviceError(
                f"weights and KV cache would take {show_bytes(needed)}, but this machine has {show_bytes(memory)}",
                hint="give it a smaller share (-ts), or lower the context (-c)",
            )


def _some(streamed: StreamedModel | None) -> StreamedModel:
    assert streamed is not None, "there is no file, so it is streamed"
    return streamed


def _find_model(path: str, models: Path | None) -> Path | None:
    """The model file on this host: of the same name in `models`, or at the same path. None: there is none."""
    given = Path(path)
    places = [given] if models is None else [models / given.name, given]
    return next((place for place in places if place.is_file()), None)


def describe(error: BaseException) -> dict[str, str]:
    """An error as fields of a message."""
    message = error.message if isinstance(error, MotleyError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, MotleyError) else None
    return {"message": message[:4000], "hint": (hint or "")[:1000]}
