"""`LLM`: a model, ready to answer. The one place where concrete parts are wired together."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from motley.backends import Backend, backend_for, get_backend
from motley.engine import BareSequence, Completion, Engine, Request, SamplingParams
from motley.engine.sessions import SessionStore
from motley.errors import ConfigError, RequestError
from motley.gguf import read_spec
from motley.kvcache.manager import CacheManager
from motley.kvcache.types import get_cache_type
from motley.models import read_params
from motley.runtime import (
    CacheConfig,
    DeviceFigures,
    KVStats,
    Progress,
    Runner,
    cache_figures,
    default_context,
    fit_cache,
    make_crew,
    split_model,
)
from motley.runtime.budget import require_host_memory
from motley.runtime.exchange import CacheExchange, identity_of
from motley.runtime.notices import notices
from motley.text import ChatTemplate, Tokenizer
from motley.units import parse_bytes

Prompt = str | Sequence[int]
_MOST, _MOST_THREADS = 2**26, 2**10  # tokens, requests; threads: more is a slip of the finger


class LLM:
    """A GGUF model on this machine's devices.

    llm = LLM("model.gguf", n_ctx=4096)
    print(llm.generate("Once upon a time", max_tokens=64).text)

    One thread at a time may call it; many requests at once go through `generate([...])` or several streams.
    """

    notices: tuple[str, ...]  # sentences about what was asked for and is done another way
    load_seconds: float  # how long it took to open and load the model

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        backend: str = "auto",
        devices: str | Sequence[str] = "cpu",
        split_mode: str | None = None,
        tensor_split: str | Sequence[float] | None = None,
        device_memory: str | Sequence[str | int] | None = None,
        kv_rotation: bool = True,
        kv_block_size: int = 32,
        kv_cache_tokens: int | None = None,
        kv_cache_bytes: str | int | None = None,
        kv_cache_demand_paged: bool = False,
        prefix_cache: bool = True,
        n_threads: int | None = None,
        n_batch: int = 512,
        n_parallel: int = 8,
        progress: Progress | None = None,
    ) -> None:
        """`n_ctx`: tokens a sequence may have (default: the model's, at most 4096). `n_batch`: tokens per pass.

        `n_parallel`: requests that run at the same time. `progress(done, total)` is called with bytes while loading.
        `devices="cpu,cpu"`, `split_mode="tensor"` (or "layer"), `tensor_split=(3, 1)`: share the model over devices;
        `device_memory=("2GiB", "1GiB")`: what each may use at most. `devices="cpu:0-7,cpu:8+10"` or `"cpu:node0"`: each
        keeps to these cores, or to a NUMA node's. `n_threads`: over all devices that name no cores.
        `cache_type_k`, `cache_type_v`: f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl; quantized ones are rotated
        unless `kv_rotation=False`. `kv_cache_tokens` or `kv_cache_bytes`: a hard limit of the cache.
        """
        started = time.perf_counter()
        for name, value, most in (
            ("n_ctx", n_ctx, _MOST),
            ("n_threads", n_threads, _MOST_THREADS),
            ("n_batch", n_batch, _MOST),
            ("n_parallel", n_parallel, _MOST),
        ):
            _require_number(name, value, most)
        cache = CacheConfig(
            get_cache_type(cache_type_k),
            get_cache_type(cache_type_v),
            block_size=kv_block_size,
            max_tokens=kv_cache_tokens,
            max_bytes=None if kv_cache_bytes is None else parse_bytes(kv_cache_bytes),
            demand_paged=kv_cache_demand_paged,
            find_prefixes=prefix_cache,
        )
        get_backend(backend)  # an unknown one is refused before anything is read
        crew = make_crew(devices, split_mode, tensor_split, device_memory)
        backends = [backend_for(device.name, backend) for device in crew.devices]
        self.spec = read_spec(model)
        params = read_params(self.spec)
        for device, runs in zip(crew.devices, backends, strict=True):
            _require_cache(device.name, runs, cache)
        self.n_ctx = n_ctx or default_context(params)
        self.tokenizer = Tokenizer.from_spec(self.spec)
        self.notices = notices(self.spec, params, cache, backends, n_ctx=self.n_ctx, rotates=kv_rotation)
        self._split = split_model(self.spec, params, crew, cache, n_ctx=self.n_ctx, rotate=kv_rotation)
        self._fit = fit_cache(self._split, cache, n_batch=n_batch, n_parallel=n_parallel)
        require_host_memory(crew, self._fit.plan)
        self._cache = CacheManager(
            self._fit.plan.group_specs(),
            cache.block_size,
            salt=repr(self._split.options).encode(),
            find_prefixes=cache.find_prefixes,
        )
        self._runner = Runner(self._split, backends, self._fit.plan, n_threads=n_threads, progress=progress)
        self._engine: Engine | None = Engine(
            self._runner,
            self._cache,
            self.tokenizer,
            n_ctx=self.n_ctx,
            n_vocab=params.n_vocab,
            n_batch=n_batch,
            n_parallel=n_parallel,
        )
        self.load_seconds = time.perf_counter() - started

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """From the file, or a plain one; made at the first chat, so that a broken one hinders nothing else."""
        return ChatTemplate.from_spec(self.spec)

    @overload
    def generate(
        self, prompt: str | Sequence[int], *, params: SamplingParams | None = None, **sampling: Any
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        *,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[Completion]: ...
    def generate(
        self, prompt: Any, *, params: SamplingParams | None = None, **sampling: Any
    ) -> Completion | list[Completion]:
        """Complete a prompt (text or token ids), or a list of prompts at once. Options: SamplingParams' fields."""
        resolved = _sampling_params(params, sampling)
        if not _is_list_of_prompts(prompt):
            return self.stream(prompt, params=resolved).finish()
        engine = self._open_engine()
        requests: list[Request] = []
        try:
            for each in prompt:
                requests.append(engine.add(self._tokens(each), resolved))
            while not all(request.is_finished for request in requests):
                engine.step()
        finally:
            for request in requests:
                engine.cancel(request)
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, *, params: SamplingParams | None = None, **sampling: Any) -> Stream:
        """Complete a prompt piece by piece; the pieces are whole characters."""
        engine = self._open_engine()
        return Stream(engine, engine.add(self._tokens(prompt), _sampling_params(params, sampling)))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, params: SamplingParams | None = None, **sampling: Any
    ) -> Completion:
        """Answer a conversation: messages with a role and content, as the model's chat template wants them."""
        return self.stream_chat(messages, params=params, **sampling).finish()

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], *, params: SamplingParams | None = None, **sampling: Any
    ) -> Stream:
        resolved = _sampling_params(params, sampling)
        if not _is_chat(messages):
            raise RequestError(
                "a chat is a list of messages", hint='for example [{"role": "user", "content": "Hello"}]'
            )
        tokens = self.tokenizer.encode(self.chat_template.render(messages))
        engine = self._open_engine()
        request = engine.add(tokens, resolved.with_stops(self.chat_template.stops), continues_prompt=False)
        return Stream(engine, request)

    def logits(self, tokens: Prompt) -> npt.NDArray[np.float32]:
        """Raw logits (tokens, vocab): row i predicts what follows token i."""
        result: npt.NDArray[np.float32] = self._open_engine().logits(self._tokens(tokens)).numpy()
        return result

    def bare_sequence(self) -> BareSequence:
        """A sequence to be fed by hand: tokens in, logits out, no sampling."""
        return self._open_engine().bare_sequence()

    def memory(self) -> dict[str, int]:
        """Bytes of weights, KV cache and activations, over all devices."""
        self._open_engine()
        totals: dict[str, int] = {}
        for device in self._runner.memory():
            for purpose, n_bytes in device.items():
                totals[purpose] = totals.get(purpose, 0) + n_bytes
        return totals

    def device_memory(self) -> dict[str, dict[str, int]]:
        """The same for each device, by its name."""
        self._open_engine()
        labels = [self._split.crew.label(i) for i in range(len(self._split.crew))]
        return dict(zip(labels, self._runner.memory(), strict=True))

    def kv_stats(self) -> KVStats:
        """The KV cache: its layout and what a token costs, blocks and tokens in use, bytes on each device."""
        self._open_engine()
        arenas = self._runner.arenas
        allocated = [sum(groups) for groups in zip(*(arena.group_bytes() for arena in arenas), strict=True)]
        devices = tuple(
            DeviceFigures(self._split.crew.label(i), arena.n_bytes, arena.n_resident)
            for i, arena in enumerate(arenas)
        )
        return KVStats(cache_figures(self._split, self._fit, allocated), self._cache.stats(), devices)

    def save_session(self, path: str | os.PathLike[str], prompt: Prompt) -> int:
        """Write the KV cache of a prompt (text or token ids) to a file, and return its size in bytes.

        What the prefix cache has of it is not computed again, so after an answer `prompt + answer.tokens` costs little.
        """
        tokens = self._tokens(prompt)
        with self._open_engine().computed(tokens) as sequence:
            return self._sessions.save(Path(path), sequence, tokens)

    def load_session(self, path: str | os.PathLike[str]) -> list[int]:
        """Bring a saved cache back, under any split and crew of the same model. Returns its tokens: a prompt that
        begins with them finds them in the prefix cache. CacheError for a file that is damaged or for another model.
        """
        self._open_engine()
        if not self._fit.plan.config.find_prefixes:
            raise ConfigError(
                "a session is loaded into the prefix cache, which is off", hint="prefix_cache=True"
            )
        return self._sessions.load(Path(path), self.n_ctx, self._split.params.n_vocab)

    @cached_property
    def _sessions(self) -> SessionStore:
        plan = self._fit.plan
        groups = {layer: i for i, group in enumerate(plan.groups) for layer in group.layers}
        return SessionStore(
            identity_of(self._split, plan),
            CacheExchange(self._split, plan, self._runner.arenas),
            self._cache,
            [groups[layer] for layer in sorted(groups)],
        )

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing; everything else is an error from now on."""
        if self._engine is not None:
            self._engine.close()
            self._runner.close()
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RequestError("this LLM is closed", hint="make a new one")
        return self._engine

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError(f"a prompt is text or a list of token ids, not {prompt!r:.60}") from None


class Stream(Iterator[str]):
    """Pieces of an answer as they come. Close it to cancel the request; `completion` is there when it has ended."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __next__(self) -> str:
        for piece in self.until(lambda: False):
            return piece
        raise StopIteration

    def until(self, is_enough: Callable[[], bool]) -> Iterator[str]:
        """The pieces until `is_enough()`, which is asked between passes through the model: in a long prompt, too."""
        while not is_enough():
            if piece := self._request.text.take():
                yield piece
            elif not self._request.is_finished:
                self.step()
            elif self._request.error is not None:
                raise self._request.error
            else:
                return

    def step(self) -> None:
        """One pass through the model; a piece may or may not come of it."""
        try:
            self._engine.step()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the request, if it still runs."""
        self._engine.cancel(self._request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # whoever stops reading does not want the rest

    def finish(self) -> Completion:
        """Run to the end."""
        for _ in self:
            pass
        return self.completion

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended or been closed."""
        if not self._request.is_finished:
            raise RequestError(
                "the answer is not complete yet", hint="read the stream to its end, or close it"
            )
        return self._request.completion()


def _is_list_of_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and not isinstance(prompt[0], int | np.integer)


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)


def _sampling_params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    if params is not None and sampling:
        raise RequestError("give either params or sampling options by name, not both")
    known = [field.name for field in fields(SamplingParams)]
    unknown = sorted(set(sampling) - set(known))
    if unknown:
        raise RequestError(f"unknown option {unknown[0]!r}", hint=f"there are: {', '.join(known)}")
    return params or SamplingParams(**sampling)


def _require_cache(device: str, backend: Backend, cache: CacheConfig) -> None:
    """Before anything is loaded, as this fails at the first batch otherwise."""
    reason = backend.refuses_cache(cache.k_type.name, cache.v_type.name, cache.block_size)
    if reason is not None:
        raise ConfigError(
            f"{device}: {reason}", hint="other --cache-type-k/-v or --kv-block-size, or the CPU"
        )


def _require_number(name: str, value: int | None, most: int) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_number and 1 <= value <= most):
        raise ConfigError(f"{name} is {value!r:.60}", hint=f"it must be a whole number from 1 to {most}")
