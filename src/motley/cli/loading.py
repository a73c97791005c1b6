"""The flags that several commands share, and how a command loads a model: with a progress bar, and with notices."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from motley.cli import options, torchrun
from motley.cli.console import loading_bar, say
from motley.errors import ConfigError
from motley.milestones import since_start
from motley.units import show_bytes

if TYPE_CHECKING:
    from motley.llm import LLM
    from motley.runtime.crew import Crew
    from motley.runtime.warm_up import WarmUp

_ALL_LAYERS = 2**31 - 1  # more than any model has
_OWN = {
    "verbose",
    "gpu_layers",
    "main_gpu",
    "ubatch_size",
    "cpu_moe",
}  # flags that `motley.LLM` does not have
# The names in `motley.LLM` of flags that have another name here.
_LLM_NAMES = {
    "ctx_size": "n_ctx",
    "threads": "n_threads",
    "device": "devices",
    "batch_size": "n_batch",
    "parallel": "n_parallel",
    "model_draft": "draft_model",
}


@dataclass(frozen=True)
class DeviceOptions:
    """The flags for devices, and for the split of a model over them."""

    ctx_size: options.CtxSize = 0
    device: options.Device = "auto"
    gpu_layers: options.GpuLayers = None
    main_gpu: options.MainGpu = None
    split_mode: options.SplitMode = None
    tensor_split: options.TensorSplit = None
    device_memory: options.DeviceMemory = None
    split_experts: options.SplitExperts = "auto"
    secret_file: options.SecretFile = None
    wire: options.Wire = "auto"
    on_loss: options.OnLoss = "wait"
    n_cpu_moe: options.NCpuMoe = None
    cpu_moe: options.CpuMoe = False
    expert_split: options.ExpertSplit = None

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


@dataclass(frozen=True)
class CrewOptions(DeviceOptions):
    """The flags for the devices and for how a model runs on them."""

    batch_size: options.BatchSize = None
    ubatch_size: options.UBatchSize = None
    backend: options.Backend = "auto"
    threads: options.Threads = None
    n_expert_used: options.NExpertUsed = None
    n_layer_exit: options.NLayerExit = None
    verbose: options.Verbose = False

    @property
    def n_batch(self) -> int | None:
        """-b or -ub; the smaller one of both."""
        return min((n for n in (self.batch_size, self.ubatch_size) if n is not None), default=None)

    def arguments(self) -> dict[str, Any]:
        """The flags as keyword arguments of `motley.LLM`: plain values, which `motley serve` sends to its engine."""
        values = {
            _LLM_NAMES.get(f.name, f.name): getattr(self, f.name) for f in fields(self) if f.name not in _OWN
        }
        values = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        own = {"n_ctx": self.ctx_size or None, "n_batch": self.n_batch, "n_cpu_moe": self.layers_apart}
        return values | own


@dataclass(frozen=True)
class LoadOptions(CrewOptions):
    """All flags that `motley.LLM` takes: those of `CrewOptions` and those of the KV cache."""

    parallel: options.Parallel = None
    cache_type_k: options.CacheTypeK = "f16"
    cache_type_v: options.CacheTypeV = "f16"
    state_type: options.StateType = "f32"
    kv_rotation: options.KvRotation = True
    kv_block_size: options.KvBlockSize = 32
    kv_cache_tokens: options.KvCacheTokens = None
    kv_cache_bytes: options.KvCacheBytes = None
    kv_cache_demand_paged: options.KvDemandPaged = False
    prefix_cache: options.PrefixCache = True
    spec: options.Spec = None
    draft_max: options.DraftMax = None
    draft_min: options.DraftMin = None
    model_draft: options.ModelDraft = None
    draft_layers: options.DraftLayers = None
    lookahead: options.LookaheadFlag = None
    lookup_answers: options.LookupAnswers = 0


def load(path: Path, chosen: LoadOptions) -> LLM:
    """Loads the model. Unless -np says otherwise it has memory for one sequence, as a command runs one."""
    from motley.llm import LLM  # here, as `motley serve` reads these flags in a process without torch

    arguments = chosen.placed(path).arguments()
    arguments["n_parallel"] = chosen.parallel or 1
    with loading_bar(f"Loading {path.name}") as (progress, compiling):
        llm = LLM(path, progress=progress, compiling=compiling, **arguments)
    llm.allow_idle_tasks()
    say_choices(llm)
    if chosen.verbose:
        for detail in llm.details:
            say(detail)
    devices = llm.device_memory()
    total = sum(memory["weights"] for memory in devices.values())
    say(f"loaded {show_bytes(total)} in {llm.load_seconds:.2f} s")
    if llm.warm_up.kernels or llm.warm_up.failures:
        say_kernels(llm.warm_up, is_verbose=chosen.verbose)
    if chosen.verbose:
        say("start: " + ", ".join(f"{seconds:.2f} s {name}" for name, seconds in since_start()))
    if len(devices) > 1:
        shares = (
            f"{name} {m['weights'] / total:.1%} ({show_bytes(m['weights'])})" for name, m in devices.items()
        )
        say(f"weights: {', '.join(shares)}")
    return llm


def say_choices(llm: LLM) -> None:
    """Prints the devices, if they were left to Motley, and the notices."""
    if llm.chosen_devices is not None:
        say(llm.chosen_devices)
    for notice in llm.notices:
        say(f"note: {notice}")


def say_kernels(warm_up: WarmUp, *, is_verbose: bool) -> None:
    """Prints how many kernels were compiled and which failed; with `is_verbose` all of them, the slowest first."""
    say(str(warm_up))
    for line in warm_up.details if is_verbose else ():
        say(line)
    for notice in warm_up.notices:
        say(f"note: {notice}")


def say_later_kernels(llm: LLM, before: WarmUp, *, is_verbose: bool) -> None:
    """Prints the kernels again if others were compiled since `before`; without `is_verbose` only if more failed."""
    now = llm.warm_up
    if (is_verbose and now != before) or now.failures != before.failures:
        say_kernels(now, is_verbose=is_verbose)
