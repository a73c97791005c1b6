"""From options to a model that is ready to run: the one place where concrete parts are wired together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from motley import compile_process
from motley.backends import Backend, backend_for, backend_for_heads, get_backend
from motley.engine import Engine
from motley.engine.checks import shorten
from motley.engine.drafting import ChainLookahead, Forced, Lookahead, Lookup, Speculator
from motley.engine.drafting.choice import DRAFT_MAX, MAX_DRAFT, default_choice, names_drafter, read_choice
from motley.engine.drafting.draft_model import DraftModel
from motley.engine.drafting.early_exit import EarlyExit
from motley.engine.drafting.loading import (
    Companion,
    DraftOptions,
    draft_companion,
    load_companion,
    nextn_companion,
    without_companion,
)
from motley.engine.drafting.lookahead import LookaheadSizes
from motley.engine.drafting.lookup import MAX_REMEMBERED
from motley.engine.drafting.mtp import NextnLayer
from motley.engine.effort import Efforts
from motley.engine.engine import ON_LOSS, WAIT
from motley.errors import CacheError, ConfigError, DeviceError
from motley.gguf import ModelSpec, read_spec
from motley.integers import as_int
from motley.kvcache.manager import CacheManager
from motley.milestones import mark
from motley.models import BatchShape, DecoderParams, check_tensors, read_params
from motley.runtime import (
    MAX_LOGIT_ROWS,
    CacheConfig,
    CacheFit,
    ModelSplit,
    Progress,
    Runner,
    split_model,
)
from motley.runtime.batches_ahead import BatchesAhead
from motley.runtime.budget import require_host_memory
from motley.runtime.crew import Crew
from motley.runtime.defaults import (
    ContextChoice,
    batch_sizes,
    choose_context,
    chosen_crew,
    size_choices,
    tokens_wanted,
)
from motley.runtime.device_names import is_loopback, parse_address
from motley.runtime.expert_fitting import experts_notice, settle_experts, with_cpu_experts
from motley.runtime.hosts.offers import with_offers
from motley.runtime.hosts.opening import Opening
from motley.runtime.hosts.protocol import read_secret
from motley.runtime.hosts.wire import choose_wire
from motley.runtime.hosts.workers import Hosts
from motley.runtime.lending import settle_lending
from motley.runtime.notices import notices
from motley.runtime.warming import KernelWarmer
from motley.text import Tokenizer

_SWITCH_SECONDS = 5e-4
_LOADING_BYTES = 2 << 30  # of a GPU, for matrices that are being repacked
_MAX_TOKENS, _MAX_THREADS = 2**26, 2**10  # tokens or requests; threads. Larger numbers are typing mistakes


@dataclass(frozen=True)
class Options:
    """The options of `LLM`, checked as far as that is possible without the model's file."""

    cache: CacheConfig
    n_ctx: int | None = None
    n_threads: int | None = None
    n_batch: int | None = None  # None: what suits the devices
    n_parallel: int | None = None
    backend: str = "auto"
    devices: str | Sequence[str] = "auto"
    split_mode: str | None = None
    tensor_split: str | Sequence[float] | None = None
    device_memory: str | Sequence[str | int] | None = None
    kv_rotation: bool = True
    split_experts: str = "auto"
    secret_file: str | os.PathLike[str] | None = None  # of workers on other hosts
    wire: str = "auto"  # how activations travel between processes
    on_loss: str = WAIT  # what happens to requests when a worker is lost
    n_cpu_moe: int | str | None = None
    expert_split: str | Sequence[float] | None = None
    n_expert_used: int | None = None
    n_layer_exit: int | None = None
    spec: str | None = None  # None: auto, and the draft model if there is one
    draft_max: int | None = None
    draft_min: int | None = None
    draft_model: str | os.PathLike[str] | None = None
    draft_layers: int | None = None  # of the model itself, for early-exit drafts; None: half of them
    lookahead: str | None = None  # W,N,G of lookahead drafts
    lookup_answers: int = 0  # tokens of each user's finished answers that lookup drafts come from, too

    def __post_init__(self) -> None:
        for name, maximum in (
            ("n_ctx", _MAX_TOKENS),
            ("n_threads", _MAX_THREADS),
            ("n_batch", _MAX_TOKENS),
            ("n_parallel", _MAX_TOKENS),
            ("draft_layers", _MAX_TOKENS),
        ):
            _set_number(self, name, maximum)
        _set_number(self, "draft_max", MAX_DRAFT)
        _set_number(self, "draft_min", MAX_DRAFT, minimum=0)
        _set_number(self, "lookup_answers", MAX_REMEMBERED, minimum=0)
        if (self.draft_min or 0) > (self.draft_max or DRAFT_MAX):
            raise ConfigError(
                f"drafts of at least {self.draft_min} and at most {self.draft_max or DRAFT_MAX} tokens",
                hint="lower --draft-min or raise --draft-max",
            )
        if not isinstance(self.spec, str | None):
            raise ConfigError(f"spec is {self.spec!r:.60}", hint="it must be text: auto, off, lookup, …")
        _lookahead_sizes(self.lookahead)
        choose_wire(self.wire, is_one_machine=True)
        if self.on_loss not in ON_LOSS:
            raise ConfigError(f"on_loss is {self.on_loss!r}", hint=f"there are: {', '.join(ON_LOSS)}")
        get_backend(self.backend)  # an unknown one is refused before anything is read


@dataclass(frozen=True)
class LoadedModel:
    """A model's parts, loaded and wired together."""

    spec: ModelSpec
    tokenizer: Tokenizer
    n_ctx: int
    chosen: str | None  # the devices, where the choice was ours
    notices: tuple[str, ...]
    details: tuple[str, ...]  # what devices chose automatically while they loaded
    warmer: KernelWarmer
    split: ModelSplit
    fit: CacheFit
    cache: CacheManager
    runner: Runner
    engine: Engine
    companions: tuple[DraftModel | NextnLayer, ...] = ()  # models that draft for it

    def close(self) -> None:
        """Frees the memory of the model and of those that draft for it."""
        self.warmer.close()
        self.runner.close()
        for companion in self.companions:
            companion.close()


def load_model(
    model: str | os.PathLike[str],
    options: Options,
    progress: Progress | None = None,
    compiling: Progress | None = None,
) -> LoadedModel:
    """Read the file, split the model over the crew, plan the cache, load the weights, compile a GPU's kernels.

    `progress` is called with bytes loaded, `compiling` with kernels compiled, where there are any.
    """
    cache = options.cache
    crew, chosen = chosen_crew(
        options.devices,
        options.split_mode,
        options.tensor_split,
        options.device_memory,
        options.split_experts,
        options.n_cpu_moe,
        options.expert_split,
        backend=options.backend,
    )
    for device in crew.devices:  # what a device lacks is said before the file is read
        backend_for(device.name, options.backend, device.remote_offer)
    secret = read_secret(options.secret_file) if crew.hosts else b""
    if crew.hosts:
        crew = with_offers(crew, secret)
    mark("devices chosen")
    spec = read_spec(model)
    params = read_params(spec)
    unused = check_tensors(spec, params)
    efforts = _efforts(params, options)
    n_exit = _exit_layers(params, options)
    has_draft = options.draft_model is not None
    chosen_spec = default_choice(has_draft) if options.spec is None else options.spec
    wants_nextn = names_drafter(chosen_spec, "mtp") and params.n_nextn > 0
    optional = {"draft": has_draft, "exit": n_exit > 0, "mtp": wants_nextn}
    read_choice(
        chosen_spec, ["grammar", "lookup", "lookahead", *(name for name, has in optional.items() if has)]
    )
    given = crew
    companions = [nextn_companion(spec, params, crew)] if wants_nextn else []
    if options.draft_model is not None:
        companions.append(draft_companion(options.draft_model, spec))
    planned = _plan_with_sizes(companions, crew, spec, params, options)
    crew, backends, context = planned.crew, planned.backends, planned.context
    n_batch, n_parallel = planned.n_batch, planned.n_parallel
    n_ctx, split, fit = context.n_ctx, context.split, context.fit
    require_host_memory(crew, fit.plan)
    mark("planned")
    if not companions and not cache.demand_paged:
        _offer_spare(split, fit, backends, n_parallel)
    manager = CacheManager(
        fit.plan.group_specs(),
        cache.block_size,
        salt=repr(split.options).encode(),
        find_prefixes=cache.find_prefixes,
    )
    loaded: list[DraftModel | NextnLayer] = []
    with ExitStack() as undo:
        for companion in companions:
            on = given if len(given) == len(crew) else crew
            loaded.append(load_companion(companion, on, backends, cache, _draft_options(options, planned)))
            undo.callback(loaded[-1].close)
        warmer = KernelWarmer(
            split,
            backends,
            fit.plan,
            n_batch=n_batch,
            n_parallel=n_parallel,
            waits_for_all=bool(companions),  # these have batches of their own
        )
        undo.callback(warmer.abort)
        warmer.record_early(backends, _spare_while_loading(fit))
        compile_process.dismiss()
        # A large vocabulary takes most of a second: time in which other threads read the weights. Kernels are recorded
        # before, because the compiler waits for them.
        reading = undo.enter_context(ThreadPoolExecutor(1)).submit(_read_tokenizer, spec, warmer)
        hosts = None
        if crew.hosts:
            is_one_machine = all(is_loopback(parse_address(host)[0]) for host in crew.hosts)
            wire = choose_wire(options.wire, is_one_machine=is_one_machine)
            opening = Opening.of(split, fit.plan, backends, n_batch, wire)
            hosts = Hosts(opening, fit.plan, crew.hosts, secret)
            undo.callback(hosts.close)
            hosts.open()
        with _sharing_python():
            runner = Runner(
                split, backends, fit.plan, n_threads=options.n_threads, progress=progress, hosts=hosts
            )
            undo.callback(runner.close)
            mark("weights")
            tokenizer = reading.result()
            mark("vocabulary")
        warmer.warm(runner, compiling, measure=runner.settle_rows)
        mark("kernels")
        ahead = BatchesAhead(warmer, runner, split, fit.plan, manager, n_batch=n_batch, n_parallel=n_parallel)
        plan_seconds = ahead.run_first()
        mark("first batches")
        undo.pop_all()
    engine = Engine(
        runner,
        manager,
        tokenizer,
        n_ctx=n_ctx,
        n_vocab=params.n_vocab,
        n_batch=n_batch,
        n_parallel=n_parallel,
        efforts=efforts,
        on_loss=options.on_loss,
        speculator=Speculator(
            [
                Forced(),
                Lookup(options.lookup_answers),
                _lookahead(_lookahead_sizes(options.lookahead), runner),
                *loaded,
                *([EarlyExit(runner, manager, n_exit)] if n_exit else []),
            ],
            spec=chosen_spec,
            draft_max=options.draft_max or DRAFT_MAX,
            draft_min=options.draft_min or 0,
            n_vocab=params.n_vocab,
            max_rows=max(n_parallel, MAX_LOGIT_ROWS),
            preparation=runner.preparation,
            plan_seconds=plan_seconds,
            computed=runner.computed_rows,
        ),
    )
    engine.scheduler.max_rows = warmer.max_rows
    later = [partial(ahead.run_later, *each) for each in ahead.later]
    has_drafts = bool(engine.speculator.default.drafters)
    drafts = [partial(_prepare_drafts, ahead, engine, n) for n in ahead.draft_rows if has_drafts]
    engine.plan_idle_tasks([*later[:1], *drafts, *later[1:]])  # the prompt comes first
    said = notices(spec, params, cache, backends, n_ctx=n_ctx, rotates=options.kv_rotation)
    said = tuple(
        notice
        for notice in (*planned.notices, unused, *said, _of_lookahead(chosen_spec, runner))
        if notice is not None
    )
    details = tuple(
        f"{device.name}: {detail}"
        for device, runs in zip(crew.devices, backends, strict=True)
        if device.host is None
        for detail in runs.details
    )
    if split.min_lent_rows is not None:
        details += (f"batches of {split.min_lent_rows} rows or more multiply by copies of the CPU's weights",)
    return LoadedModel(
        spec,
        tokenizer,
        n_ctx,
        chosen,
        said,
        details,
        warmer,
        split,
        fit,
        manager,
        runner,
        engine,
        tuple(loaded),
    )


@contextmanager
def _sharing_python() -> Iterator[None]:
    """Let threads have Python's lock after half a millisecond instead of five: the thread that reads weights needs it
    for a moment after each part, and others read the vocabulary and record kernels meanwhile.
    """
    before = sys.getswitchinterval()
    if before <= _SWITCH_SECONDS:  # another model is being loaded
        yield
        return
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _read_tokenizer(spec: ModelSpec, warmer: KernelWarmer) -> Tokenizer:
    warmer.wait_early()
    return Tokenizer.from_spec(spec)


def _prepare_drafts(ahead: BatchesAhead, engine: Engine, n_rows: int) -> None:
    """Makes the plan of steps with drafts, outside of answers."""
    ahead.prepare_drafts(n_rows)
    engine.speculator.add_plan(n_rows, n_requests=1, most_rows=n_rows)


@dataclass(frozen=True)
class _Planned:
    """A crew with its backends, and the context and the cache that fit."""

    crew: Crew
    backends: list[Backend]
    context: ContextChoice
    n_batch: int
    n_parallel: int
    notices: tuple[str | None, ...]


def _plan_on_crew(crew: Crew, spec: ModelSpec, params: DecoderParams, options: Options) -> _Planned:
    """The plan for the crew. Experts that do not fit on GPUs are on the CPU, unless the user has said how to split."""
    asked = (options.n_cpu_moe, options.expert_split, options.split_mode, options.tensor_split)
    is_left_to_us = params.experts is not None and all(option is None for option in asked)
    other = with_cpu_experts(crew) if is_left_to_us else None
    if other is not None and len(other) == len(crew):  # the CPU is in the crew already
        return _plan(other, spec, params, options)
    try:
        return _plan(crew, spec, params, options)
    except DeviceError:
        if other is None:
            raise
        return _plan(other, spec, params, options)


def _plan(crew: Crew, spec: ModelSpec, params: DecoderParams, options: Options) -> _Planned:
    sharing = [device.name for device in crew.sharing]
    n_batch, n_parallel = batch_sizes(options.n_batch, options.n_parallel, sharing)
    sizes = {"n_batch": n_batch, "n_parallel": n_parallel}
    heads = params.head_dim, params.n_heads // params.n_kv_heads
    chosen = [
        backend_for_heads(device.name, options.backend, *heads, device.remote_offer)
        for device in crew.devices
    ]
    backends = [backend for backend, _ in chosen]
    cache = options.cache
    for device, backend in zip(crew.devices, backends, strict=True):
        _require_cache(device.name, backend, cache)

    def split_over(crew: Crew, n_ctx: int) -> ModelSplit:
        return split_model(spec, params, crew, cache, n_ctx=n_ctx, rotate=options.kv_rotation)

    settled = settle_experts(crew, params, split_over, backends, cache, n_ctx=options.n_ctx, **sizes)

    def context_of(crew: Crew) -> ContextChoice:
        return choose_context(
            options.n_ctx, lambda n_ctx: split_over(crew, n_ctx), params, backends, cache, **sizes
        )

    lending = settle_lending(settled, backends, lambda: split_over(settled, options.n_ctx or 1))
    try:
        context, settled = context_of(lending), lending
    except (DeviceError, CacheError):  # the GPU has no memory for borrowed weights
        context = context_of(settled)
    slow = dict.fromkeys(notice for _, notice in chosen)
    notices = (context.notice, experts_notice(crew, settled, params), *slow)
    return _Planned(settled, backends, context, n_batch, n_parallel, notices)


def _offer_spare(split: ModelSplit, fit: CacheFit, backends: Sequence[Backend], n_parallel: int) -> None:
    """Tell each backend what memory its device has left beside the model and the cache."""
    for index, (room, backend) in enumerate(zip(fit.room, backends, strict=True)):
        if room is not None and split.crew.devices[index].host is None:
            graph = split.share(index, BatchShape(1, 1)).graph
            backend.offer_spare(room - fit.plan.n_bytes(index), graph, n_parallel)


def _spare_while_loading(fit: CacheFit) -> list[int | None]:
    """Bytes that each device has left beside the model, the cache and what loading takes; None: no known limit."""
    return [
        None if room is None else room - fit.plan.n_bytes(device) - _LOADING_BYTES
        for device, room in enumerate(fit.room)
    ]


def _plan_beside(
    companions: Sequence[Companion],
    crew: Crew,
    spec: ModelSpec,
    params: DecoderParams,
    options: Options,
) -> _Planned:
    """The plan for the crew, with the memory that models that draft leave."""
    if not companions:
        return _plan_on_crew(crew, spec, params, options)
    sharing = [device.name for device in crew.sharing]
    n_batch, n_parallel = batch_sizes(options.n_batch, options.n_parallel, sharing)
    shared = DraftOptions(options.n_ctx, n_batch, n_parallel, options.n_threads, options.kv_rotation)
    backends = [backend_for(device.name, options.backend, device.remote_offer) for device in crew.devices]
    for companion in companions:
        crew = without_companion(companion, crew, backends, options.cache, shared)
    try:
        return _plan_on_crew(crew, spec, params, options)
    except DeviceError as error:
        beside = " and ".join(companion.name for companion in companions)
        raise DeviceError(
            f"too little memory for the model beside its {beside}: {error.message}", hint=error.hint
        ) from error


def _plan_with_sizes(
    companions: Sequence[Companion], crew: Crew, spec: ModelSpec, params: DecoderParams, options: Options
) -> _Planned:
    """The plan with the largest default sizes of steps with which the model fits, and some context beside it."""
    names = [device.name for device in crew.sharing]
    first, *_ = choices = size_choices(options.n_batch, options.n_parallel, names)
    wanted = tokens_wanted(options.n_ctx, params.n_ctx_train, options.cache)
    fallback: _Planned | None = None
    for sizes in choices:
        sized = replace(options, n_batch=sizes[0], n_parallel=sizes[1])
        try:
            planned = _plan_beside(companions, crew, spec, params, sized)
        except (DeviceError, CacheError):
            if sizes == choices[-1] and fallback is None:
                raise
            continue
        if sizes != first:
            planned = replace(planned, notices=(*planned.notices, _of_sizes(options, sizes)))
        if _has_room(planned.context.fit, wanted):
            return planned
        fallback = fallback or planned
    assert fallback is not None
    return fallback


def _has_room(fit: CacheFit, n_tokens: int) -> bool:
    """Whether what each request takes, states and windows, leaves room for `n_tokens`."""
    first, *windows = fit.plan.groups
    takes_room = bool(windows) or fit.plan.states is not None
    return not takes_room or first.n_blocks * fit.plan.config.block_size >= n_tokens


def _of_sizes(options: Options, sizes: tuple[int, int]) -> str:
    """A notice about sizes that are smaller than usual."""
    (n_batch, n_parallel), said, flags = sizes, [], []
    if options.n_parallel is None:
        said.append(f"at most {n_parallel} {'request runs' if n_parallel == 1 else 'requests run'} at a time")
        flags.append("-np")
    if options.n_batch is None:
        said.append(f"a step has at most {n_batch} tokens")
        flags.append("-b")
    asks = "ask for numbers" if len(flags) > 1 else "asks for a number"
    return f"{' and '.join(said)}: there is no memory for more ({' and '.join(flags)} {asks})"


def _draft_options(options: Options, planned: _Planned) -> DraftOptions:
    return DraftOptions(
        options.n_ctx, planned.n_batch, planned.n_parallel, options.n_threads, options.kv_rotation
    )


def _lookahead(sizes: LookaheadSizes, runner: Runner) -> Lookahead | ChainLookahead:
    return Lookahead(sizes) if runner.refuses_trees is None else ChainLookahead(sizes)


def _of_lookahead(spec: str, runner: Runner) -> str | None:
    """A notice if lookahead was chosen and its drafts cannot be trees."""
    why = runner.refuses_trees if names_drafter(spec, "lookahead") else None
    return why and f"drafts of lookahead are chains, and guess worse: {why}"


def _lookahead_sizes(text: str | None) -> LookaheadSizes:
    if not isinstance(text, str | None):
        raise ConfigError(f"lookahead is {text!r:.60}", hint='it must be text: W,N,G, for example "7,5,7"')
    return LookaheadSizes() if text is None else LookaheadSizes.read(text)


def _exit_layers(params: DecoderParams, options: Options) -> int:
    """The layers of early-exit drafts: half of the model's, unless the options say otherwise.

    0: there are none, as the model has only one layer, or as drafted tokens would stay in recurrent states.
    """
    if options.draft_layers is not None and options.draft_layers >= params.n_layers:
        raise ConfigError(
            f"draft_layers={options.draft_layers}, but the model has {params.n_layers} layers",
            hint="drafts (--draft-layers) must leave out at least one layer",
        )
    if params.delta is not None:
        return 0
    return options.draft_layers or params.n_layers // 2


def _efforts(params: DecoderParams, options: Options) -> Efforts:
    experts = params.experts
    if experts is None:
        efforts = Efforts(params.n_layers)
    else:
        efforts = Efforts(params.n_layers, experts.n_experts, experts.n_used, experts.n_usable)
    efforts.default = efforts.choose(options.n_expert_used, options.n_layer_exit)
    return efforts


def _require_cache(device: str, backend: Backend, cache: CacheConfig) -> None:
    """Before anything is loaded, as this fails at the first batch otherwise."""
    reason = backend.refuses_cache(cache.k_type.name, cache.v_type.name, cache.block_size)
    if reason is not None:
        raise ConfigError(
            f"{device}: {reason}", hint="other --cache-type-k/-v or --kv-block-size, or the CPU"
        )


def _set_number(options: Options, name: str, maximum: int, minimum: int = 1) -> None:
    """Makes the option a plain int, if it is given; ConfigError for other values."""
    value = getattr(options, name)
    if value is None:
        return
    number = as_int(value)
    if number is None or not minimum <= number <= maximum:
        raise ConfigError(
            f"{name} is {shorten(value)}", hint=f"it must be a whole number from {minimum} to {maximum}"
        )
    object.__setattr__(options, name, number)
