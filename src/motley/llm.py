"""`LLM`: a model, ready to answer."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from types import TracebackType
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

from motley.assembly import LoadedModel, Options, load_model
from motley.bundled import bundled_model_path
from motley.engine import (
    AsyncStream,
    Completion,
    Engine,
    EngineService,
    RawSequence,
    Request,
    SamplingParams,
    Stream,
)
from motley.engine.effort import prefix_salt
from motley.engine.embedding import choose_pooling, pooled
from motley.engine.options import (
    ParamsLike,
    at_index,
    is_list_of_prompts,
    read_params,
    read_params_of_list,
    read_path,
    read_prompt,
)
from motley.engine.service import closed_error
from motley.engine.sessions import SessionStore
from motley.errors import ConfigError, RequestError
from motley.gguf import ModelSpec
from motley.kvcache.types import get_cache_type
from motley.runtime import CacheConfig, DeviceFigures, KVStats, Progress, cache_figures
from motley.runtime.background_warming import BackgroundWarming
from motley.runtime.exchange import CacheExchange, identity_of
from motley.runtime.traffic import token_bytes
from motley.runtime.warm_up import WarmUp
from motley.text import ChatTemplate, Tokenizer
from motley.text.messages import normalise_messages
from motley.units import parse_bytes

Prompt = str | Sequence[int]
T = TypeVar("T")


class LLM:
    """A GGUF model on this machine's devices.

    llm = LLM("model.gguf", n_ctx=4096)
    print(llm.generate("Once upon a time", max_tokens=64).text)

    Any number of threads and event loops may use it at the same time: one thread of its own runs the model, and all
    requests share its steps. `generate`, `stream`, `chat` and `stream_chat` have twins for coroutines.
    """

    chosen_devices: str | None  # a sentence about the devices, where they were left to Motley
    notices: tuple[str, ...]  # sentences about options that are carried out in another way
    details: tuple[str, ...]  # what devices chose automatically while they loaded
    load_seconds: float  # how long it took to open and load the model

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        n_ctx: int | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        state_type: str = "f32",
        backend: str = "auto",
        devices: str | Sequence[str] = "auto",
        split_mode: str | None = None,
        tensor_split: str | Sequence[float] | None = None,
        device_memory: str | Sequence[str | int] | None = None,
        split_experts: str = "auto",
        secret_file: str | os.PathLike[str] | None = None,
        wire: str = "auto",
        on_loss: str = "wait",
        n_cpu_moe: int | str | None = None,
        expert_split: str | Sequence[float] | None = None,
        n_expert_used: int | None = None,
        n_layer_exit: int | None = None,
        spec: str | None = None,
        draft_max: int | None = None,
        draft_min: int | None = None,
        draft_model: str | os.PathLike[str] | None = None,
        draft_layers: int | None = None,
        lookahead: str | None = None,
        lookup_answers: int = 0,
        kv_rotation: bool = True,
        kv_block_size: int = 32,
        kv_cache_tokens: int | None = None,
        kv_cache_bytes: str | int | None = None,
        kv_cache_demand_paged: bool = False,
        prefix_cache: bool = True,
        n_threads: int | None = None,
        n_batch: int | None = None,
        n_parallel: int | None = None,
        progress: Progress | None = None,
        compiling: Progress | None = None,
    ) -> None:
        """`model`: a GGUF file; None or "bundled": the small model that comes with Motley.
        `n_ctx`: tokens a sequence may have (default: as trained, cut to what fits). `n_batch`: tokens per step
        (2048 on GPUs, 512 on a CPU). `n_parallel`: requests that run at the same time (128, 8). Both defaults are lower
        where memory has no room for more.

        `progress(done, total)` is called with bytes while loading, `compiling(done, total)` with kernels, the first
        time that a model runs on a kind of GPU.
        `devices="auto"`: all GPUs, split by tensor and by their free memory; without any, the CPU.
        `devices="cpu,cpu"`, `split_mode="tensor"` (or "layer"), `tensor_split=(3, 1)`: share the model over devices;
        `devices="(cuda:0,cuda:1),(cpu,cpu)@host"`: groups share layers and split tensors within;
        `device_memory=("2GiB", "1GiB")`: what each may use at most. `devices="cpu:0-7,cpu:8+10"` or `"cpu:node0"`: each
        keeps to these cores, or to a NUMA node's. `n_threads`: over all devices that name no cores.
        `devices="cpu,cpu@10.0.0.2:29400"`: a device of a worker process (`motley worker`) on another host, or on this
        one; `secret_file`: the secret of the workers. `wire`: activations travel as f32 (default on one machine), f16
        (default between machines) or q8. `on_loss`: when a worker is lost, requests "wait" until it is
        back, and are then computed again, or "fail".
        `split_experts`: in tensor mode, "ffn" cuts every expert, "whole" gives each device whole ones. `n_cpu_moe=20`:
        the routed experts of the first 20 layers are on the CPU (of several CPU devices: on the last one), everything
        else is on the other devices; "auto": of as few layers as the others' memory needs. `expert_split=(1, 3)`: these
        experts are shared out in proportions of their own. `n_expert_used`,
        `n_layer_exit`: what requests use that do not say (see SamplingParams).
        `spec`, `draft_max`, `draft_min`: which drafters guess tokens of requests that do not say ("auto", and "draft"
        if there is a draft model; "off": none), and the most and the fewest tokens of a draft (see SamplingParams).
        `draft_model`: a smaller model with the same vocabulary. `draft_layers`: layers of the model itself that make
        early-exit drafts. `lookahead="7,5,7"`: window, n and pool of lookahead drafts. `lookup_answers=4096`: drafts
        are also looked up in the latest tokens of finished answers with the same `cache_salt`. See docs/speculation.md.
        `cache_type_k`, `cache_type_v`: f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl; quantized ones are rotated
        unless `kv_rotation=False`. `state_type`: of recurrent states, f32 or bf16. `kv_cache_tokens` or
        `kv_cache_bytes`: a hard limit of the cache.
        """
        started = time.perf_counter()
        cache = CacheConfig(
            get_cache_type(cache_type_k),
            get_cache_type(cache_type_v),
            block_size=kv_block_size,
            max_tokens=kv_cache_tokens,
            max_bytes=None if kv_cache_bytes is None else parse_bytes(kv_cache_bytes),
            demand_paged=kv_cache_demand_paged,
            find_prefixes=prefix_cache,
            state_type=state_type,
        )
        options = Options(
            cache=cache,
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_batch=n_batch,
            n_parallel=n_parallel,
            backend=backend,
            devices=devices,
            split_mode=split_mode,
            tensor_split=tensor_split,
            device_memory=device_memory,
            kv_rotation=kv_rotation,
            split_experts=split_experts,
            secret_file=secret_file,
            wire=wire,
            on_loss=on_loss,
            n_cpu_moe=n_cpu_moe,
            expert_split=expert_split,
            n_expert_used=n_expert_used,
            n_layer_exit=n_layer_exit,
            spec=spec,
            draft_max=draft_max,
            draft_min=draft_min,
            draft_model=None if draft_model is None else read_path("draft_model", draft_model),
            draft_layers=draft_layers,
            lookahead=lookahead,
            lookup_answers=lookup_answers,
        )
        is_bundled = model is None or model == "bundled"
        path = bundled_model_path() if is_bundled else read_path("model", model)
        loaded = load_model(path, options, progress, compiling)
        self.spec: ModelSpec = loaded.spec
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.n_ctx: int = loaded.n_ctx
        self.chosen_devices = loaded.chosen
        self.notices = loaded.notices
        self.details = loaded.details
        self._loaded: LoadedModel = loaded
        # One text is scored or saved at a time: two might wait for each other's room.
        self._scoring_lock = threading.Lock()
        self._service = EngineService(loaded.engine, on_stop=loaded.close)
        loaded.runner.report_losses_to(loaded.engine.report_loss)
        self._warming = BackgroundWarming(
            loaded.warmer,
            loaded.runner,
            call=_calling(self._service),
            is_busy=lambda: loaded.engine.has_work,
            set_limit=loaded.engine.set_limit,
        )
        loaded.engine.wait_for_kernels = self._warming.wait
        self._warming.start()
        self.load_seconds = time.perf_counter() - started

    def allow_idle_tasks(self) -> None:
        """Lets the engine prepare steps with drafts before its first answer, while it is idle; otherwise after it."""
        self._service.allow_idle_tasks()

    @property
    def warm_up(self) -> WarmUp:
        """Kernels that were compiled for this model so far."""
        return self._loaded.warmer.warm_up

    @property
    def compiles_ahead(self) -> bool:
        """Whether kernels are compiled before their first use: those of GPUs of this process, unless that failed, or a
        crew with devices in other processes has a CPU or GPUs of several kinds.
        """
        return self._loaded.warmer.compiles_ahead

    def finish_compiling(self) -> None:
        """Wait until all kernels are compiled. Until then, on a GPU that runs the model for the first time, steps have
        few rows: long prompts are slow, and only some requests run at the same time.
        """
        self._warming.wait()

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, or a plain one. Made at the first chat: a broken one affects nothing else."""
        return ChatTemplate.from_spec(self.spec)

    # Answers

    @overload
    def generate(
        self, prompt: str | Sequence[int], *, params: ParamsLike | None = None, **sampling: Any
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        params: ParamsLike | Sequence[ParamsLike] | None = None,
        **sampling: Any,
    ) -> list[Completion]: ...
    def generate(
        self, prompt: Any, *, params: ParamsLike | Sequence[ParamsLike] | None = None, **sampling: Any
    ) -> Any:
        """Complete a prompt (text or token ids), or a list of prompts at once. Options: SamplingParams' fields.

        One prompt gives a Completion; a list gives a list, and `params` may then be a list, too. With `n` > 1, a list
        of `n` Completions is in the place of each Completion.
        Of a list, an answer that failed has the finish_reason "failed" and its `error`; the others are complete.
        """
        jobs, is_list = self._jobs(prompt, params, sampling)
        streams = [[Stream(self._service, request) for request in requests] for requests in jobs]
        try:
            if not is_list and len(streams[0]) == 1:
                return streams[0][0].finish()
            results = [[stream.result() for stream in choices] for choices in streams]
        finally:
            for choices in streams:
                for stream in choices:
                    stream.close()
        return _shaped(results, is_list)

    async def agenerate(
        self, prompt: Any, *, params: ParamsLike | Sequence[ParamsLike] | None = None, **sampling: Any
    ) -> Any:
        """`generate` for a coroutine. A task that is cancelled cancels its requests."""
        jobs, is_list = self._jobs(prompt, params, sampling)
        streams = [[AsyncStream(self._service, request) for request in requests] for requests in jobs]
        try:
            if not is_list and len(streams[0]) == 1:
                return await streams[0][0].finish()
            results = [[await stream.result() for stream in choices] for choices in streams]
        finally:
            for choices in streams:
                for stream in choices:
                    stream.close()
        return _shaped(results, is_list)

    def stream(self, prompt: Prompt, *, params: ParamsLike | None = None, **sampling: Any) -> Stream:
        """Complete a prompt piece by piece; the pieces are whole characters."""
        return Stream(self._service, self._submit(prompt, read_params(params, sampling)))

    def astream(self, prompt: Prompt, *, params: ParamsLike | None = None, **sampling: Any) -> AsyncStream:
        """`stream` for a coroutine: `async for piece in llm.astream(…)`."""
        return AsyncStream(self._service, self._submit(prompt, read_params(params, sampling)))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, params: ParamsLike | None = None, **sampling: Any
    ) -> Completion:
        """Answer a conversation: messages with a role and content, which is text or a list of parts with text."""
        return self.stream_chat(messages, params=params, **sampling).finish()

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, params: ParamsLike | None = None, **sampling: Any
    ) -> Stream:
        """`chat`, piece by piece."""
        return Stream(self._service, self._submit_chat(messages, read_params(params, sampling)))

    async def achat(
        self, messages: Sequence[Mapping[str, Any]], *, params: ParamsLike | None = None, **sampling: Any
    ) -> Completion:
        """`chat` for a coroutine."""
        return await self.astream_chat(messages, params=params, **sampling).finish()

    def astream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, params: ParamsLike | None = None, **sampling: Any
    ) -> AsyncStream:
        """`stream_chat` for a coroutine."""
        return AsyncStream(self._service, self._submit_chat(messages, read_params(params, sampling)))

    def logits(
        self, tokens: Prompt, *, n_expert_used: int | None = None, n_layer_exit: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Raw logits (tokens, vocab): row i predicts what follows token i. The prefix cache is not used.

        `n_expert_used`, `n_layer_exit`: see SamplingParams.
        """
        ids = self._tokens(tokens)
        engine = self._open_engine()
        engine.check_length(ids)
        effort = engine.efforts.choose(n_expert_used, n_layer_exit)
        with (
            self._scoring_lock,
            RawSequence(self._service, engine, is_internal=True, effort=effort) as sequence,
        ):
            result: npt.NDArray[np.float32] = sequence.feed(ids).numpy()
            return result

    def embed(
        self,
        texts: Any,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        parse_special: bool = True,
        n_expert_used: int | None = None,
        n_layer_exit: int | None = None,
    ) -> Any:
        """The embedding of a text (or token ids): its hidden states after the final norm, pooled. (embd,) float32

        Of a list of texts: (texts, embd). `pooling`: "mean", "last", "cls" (the first token) or "none", which gives
        (tokens, embd), of a list a list of these. Default: the model file's, or "mean". `normalize`: to length 1.
        `n_expert_used`, `n_layer_exit`: see SamplingParams.
        """
        kind = choose_pooling(pooling, self.spec.metadata, self.spec.architecture)
        is_list = is_list_of_prompts(texts)
        read = partial(read_prompt, self.tokenizer, parse_special=parse_special)
        engine = self._open_engine()
        all_ids = [
            at_index("texts", i, partial(read, text)) for i, text in enumerate(texts if is_list else [texts])
        ]
        for i, ids in enumerate(all_ids):
            at_index("texts", i, partial(engine.check_length, ids))
        effort = engine.efforts.choose(n_expert_used, n_layer_exit)
        found = []
        for ids in all_ids:
            with (
                self._scoring_lock,
                RawSequence(self._service, engine, is_internal=True, effort=effort) as sequence,
            ):
                found.append(pooled(sequence.embed(ids).numpy(), kind, normalize))
        if not is_list:
            return found[0]
        if kind == "none":
            return found
        return np.stack(found) if found else np.zeros((0, self.n_embd), dtype=np.float32)

    @property
    def n_embd(self) -> int:
        """The size of an embedding."""
        return self._loaded.split.params.n_embd

    def raw_sequence(
        self, *, n_expert_used: int | None = None, n_layer_exit: int | None = None
    ) -> RawSequence:
        """A sequence to be fed by hand: tokens in, logits out, no sampling."""
        engine = self._open_engine()
        return RawSequence(self._service, engine, effort=engine.efforts.choose(n_expert_used, n_layer_exit))

    # Figures

    @property
    def n_expert_used(self) -> int:
        """Experts that each token uses where a request does not say; 0 for a dense model."""
        experts, chosen = self._loaded.split.params.experts, self._loaded.engine.efforts.default.n_experts
        return 0 if experts is None else chosen or experts.n_used

    def token_bytes(
        self, n_context: float = 0, *, n_expert_used: int | None = None, n_layer_exit: int | None = None
    ) -> int:
        """Bytes of weights, keys and values that one decoded token reads after `n_context` tokens."""
        loaded, effort = self._loaded, self._loaded.engine.efforts.choose(n_expert_used, n_layer_exit)
        return token_bytes(
            loaded.split,
            loaded.fit.plan,
            n_context,
            n_experts=effort.n_experts,
            n_layers=effort.n_layers,
        )

    def memory(self) -> dict[str, int]:
        """Bytes of weights, KV cache and activations, and of a draft model, over all devices."""
        totals: dict[str, int] = {}
        for device in self._call(self._loaded.runner.memory):
            for purpose, n_bytes in device.items():
                totals[purpose] = totals.get(purpose, 0) + n_bytes
        for draft in self._loaded.companions:  # activations are shared
            devices = self._call(draft.runner.memory)
            n_bytes = sum(memory["weights"] + memory["kv_cache"] for memory in devices)
            totals["draft_model"] = totals.get("draft_model", 0) + n_bytes
        return totals

    def device_memory(self) -> dict[str, dict[str, int]]:
        """The same for each device, by its name."""
        crew = self._loaded.split.crew
        labels = [crew.label(i) for i in range(len(crew))]
        return dict(zip(labels, self._call(self._loaded.runner.memory), strict=True))

    def kv_stats(self) -> KVStats:
        """The KV cache: its layout and what a token costs, blocks and tokens in use, bytes on each device."""
        return self._call(self._kv_stats)

    def _kv_stats(self) -> KVStats:
        loaded, parts = self._loaded, self._loaded.runner.cache_bytes()
        allocated = [sum(groups) for groups in zip(*(part.groups for part in parts), strict=True)]
        devices = tuple(
            DeviceFigures(loaded.split.crew.label(i), part.total, part.resident)
            for i, part in enumerate(parts)
        )
        return KVStats(cache_figures(loaded.split, loaded.fit, allocated), loaded.cache.stats(), devices)

    # Sessions

    def save_session(self, path: str | os.PathLike[str], prompt: Prompt) -> int:
        """Write the KV cache of a prompt (text or token ids) to a file, and return its size in bytes.

        What the prefix cache has of it is not computed again, so after an answer `prompt + answer.tokens` costs little.
        """
        place = read_path("the session's file", path)
        tokens = self._tokens(prompt)
        engine = self._open_engine()
        engine.check_length(tokens)
        with self._scoring_lock, RawSequence(self._service, engine, prefix=tokens, is_internal=True) as raw:
            if rest := tokens[raw.n_cached :]:
                raw.feed(rest, n_outputs=0)
            assert raw.sequence is not None, "it is open"
            return self._call(lambda: self._sessions).save(place, raw.sequence, tokens)

    def load_session(self, path: str | os.PathLike[str]) -> list[int]:
        """Bring a saved cache back, under any split and crew of the same model. Returns its tokens: a prompt that
        begins with them finds them in the prefix cache. CacheError for a file that is damaged or for another model.
        """
        place = read_path("the session's file", path)
        self._open_engine()
        if not self._loaded.fit.plan.config.find_prefixes:
            raise ConfigError(
                "a session is loaded into the prefix cache, which is off", hint="prefix_cache=True"
            )
        n_vocab = self._loaded.split.params.n_vocab
        with self._scoring_lock:
            return self._call(lambda: self._sessions).load(place, self.n_ctx, n_vocab)

    def forget(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        n_expert_used: int | None = None,
        n_layer_exit: int | None = None,
    ) -> None:
        """Drop the cache of a prompt (text or token ids): one that begins with its tokens is computed again.

        Only of requests with the same `cache_salt`, number of experts and number of layers (None: the default): others
        have blocks of their own.
        """
        engine, tokens = self._open_engine(), self._tokens(prompt)
        effort = engine.efforts.choose(n_expert_used, n_layer_exit)
        self._call(lambda: engine.forget(tokens, prefix_salt(effort, cache_salt)))

    @cached_property
    def _sessions(self) -> SessionStore:
        loaded = self._loaded
        salt = loaded.engine.efforts.default.salt
        return SessionStore(
            self._service,
            loaded.engine,
            identity_of(loaded.split, loaded.fit.plan, salt),
            CacheExchange(loaded.split, loaded.fit.plan, loaded.runner),
            loaded.fit.plan.group_of_layers(),
            salt,
        )

    # Its parts, for the server

    @property
    def engine(self) -> Engine:
        """The engine; only what it allows to other threads may be called. RequestError if the LLM is closed."""
        return self._open_engine()

    @property
    def service(self) -> EngineService:
        """The service whose thread owns the engine."""
        return self._service

    # Opening and closing

    def close(self) -> None:
        """Give the memory back; requests that still run end with an error. Calling it again does nothing; everything
        else is an error from now on.
        """
        self._service.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "an LLM cannot be pickled or copied: it has threads and memory of devices",
            hint="load the model in the other process; requests may share one LLM from many threads",
        )

    def _open_engine(self) -> Engine:
        if not self._service.is_open:
            raise closed_error()
        return self._loaded.engine

    def _call(self, work: Callable[[], T]) -> T:
        return self._service.call(work)

    def _submit(self, prompt: Prompt, params: SamplingParams, *, continues_prompt: bool = True) -> Request:
        """Queue a prompt."""
        if params.n > 1:
            raise RequestError(f"n={params.n}: a stream or a chat is one answer", hint="use generate")
        request = self._open_engine().new_request(
            self._tokens(prompt, params.parse_special), params, continues_prompt=continues_prompt
        )
        self._service.submit(request)
        return request

    def _jobs(
        self, prompt: Any, params: Any, sampling: Mapping[str, Any]
    ) -> tuple[list[list[Request]], bool]:
        """Queue the answers of each prompt: all of them, or none if one is refused. Also: whether it was a list."""
        engine = self._open_engine()
        self._service.require_reader()
        if is_list_of_prompts(prompt):
            each = read_params_of_list(params, sampling, len(prompt))
            jobs = [
                at_index("prompts", i, partial(self._choices, engine, one, own))
                for i, (one, own) in enumerate(zip(prompt, each, strict=True))
            ]
        else:
            jobs = [self._choices(engine, prompt, read_params(params, sampling))]
        for request in chain.from_iterable(jobs):
            self._service.submit(request)
        return jobs, is_list_of_prompts(prompt)

    def _choices(self, engine: Engine, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """A request for each of the `n` answers to a prompt; the others follow the first one."""
        tokens = self._tokens(prompt, params.parse_special)
        requests: list[Request] = []
        for own in params.choices():
            requests.append(engine.new_request(tokens, own, leader=requests[0] if requests else None))
        return requests

    def _submit_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams) -> Request:
        marked = self.chat_template.render_marked(normalise_messages(messages))
        tokens = self.tokenizer.encode_marked(marked)
        return self._submit(tokens, params.with_stops(self.chat_template.stops), continues_prompt=False)

    def _tokens(self, prompt: Prompt, parse_special: bool = True) -> list[int]:
        return read_prompt(self.tokenizer, prompt, parse_special)


def _shaped(results: list[list[Completion]], is_list: bool) -> Any:
    """The return value of `generate`: a list for a list of prompts, a list for `n` > 1."""
    answers = [choices[0] if len(choices) == 1 else choices for choices in results]
    return answers if is_list else answers[0]


def _calling(service: EngineService) -> Callable[[Callable[[], None]], None]:
    """`service.call`, which does not keep the service: the engine refers to it, and the service to the engine."""
    found = weakref.ref(service)

    def call(work: Callable[[], None]) -> None:
        service = found()
        if service is None:
            raise closed_error()
        service.call(work)

    return call
