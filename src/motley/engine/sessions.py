"""Saves a sequence's cache to a file and loads it, under any split and crew of the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from motley.engine.engine import Engine
from motley.engine.raw import Owner
from motley.errors import CacheError
from motley.kvcache.results import Restored
from motley.kvcache.session_file import Contents, Identity, SessionFile, write_session
from motley.runtime.exchange import CacheExchange, Planes, to_bytes


class SessionStore:
    """Copies between files and the cache. Files are read and written in the caller's thread; the engine's thread only
    copies one layer at a time, between two steps.
    """

    def __init__(
        self,
        owner: Owner,
        engine: Engine,
        identity: Identity,
        exchange: CacheExchange,
        groups: Sequence[int],
        salt: bytes = b"",
    ) -> None:
        """`groups`: the group number of each layer. `salt`: that of the requests' prefix keys."""
        self._owner = owner
        self._engine = engine
        self._cache = engine.cache
        self._identity = identity
        self._exchange = exchange
        self._groups = groups
        self._salt = salt

    def save(self, path: Path, sequence: int, tokens: Sequence[int]) -> int:
        """Writes the cache of a sequence and returns the number of bytes. `tokens`: exactly those of the sequence."""
        groups = range(len(self._cache.groups))
        n_losses = self._engine.n_losses
        views = self._owner.call(lambda: [self._cache.stored_slots(sequence, group) for group in groups])
        firsts = tuple(views[group][0] for group in self._groups)

        def parts() -> Iterator[bytes]:
            for layer, group in enumerate(self._groups):
                planes = self._owner.call(partial(self._exchange.read, layer, views[group][1]))
                self._engine.require_no_loss(n_losses)  # the planes would be those of an empty cache
                yield from map(to_bytes, planes)

        return write_session(path, self._identity, Contents(tuple(tokens), firsts), parts())

    def load(self, path: Path, n_ctx: int, n_vocab: int) -> list[int]:
        """Loads a file's tokens into the prefix cache and returns them. Prompts that begin with them hit it."""
        with closing(SessionFile(path, self._identity)) as file:
            tokens, firsts = file.contents.tokens, file.contents.firsts
            self._check(path, tokens, n_ctx, n_vocab)
            self._cache.require_fit(len(tokens), 1)
            n_losses = self._engine.n_losses
            held: list[Restored] = []  # filled on the engine's thread: an interrupt here does not lose it
            try:
                self._owner.call(lambda: held.append(self._begin(path, tokens)))
                (restored,) = held
                for layer, group in enumerate(self._groups):
                    n_skipped = restored.firsts[group] - firsts[layer]
                    if n_skipped < 0:
                        raise CacheError(
                            f"{path}: layer {layer} has tokens from {firsts[layer]} on, but a cache with blocks of "
                            f"{self._cache.block_size} needs them from {restored.firsts[group]} on",
                            hint="load it with the --kv-block-size that it was saved with, or a smaller one",
                        )
                    planes = list(self._read(file, layer, len(tokens) - firsts[layer], n_skipped))
                    self._owner.call(partial(self._exchange.write, layer, restored.slots[group], planes))
                file.require_end()
                self._owner.call(lambda: self._commit(restored, tokens, n_losses))
            finally:
                self._owner.post(lambda: self._end(held))
        return list(tokens)

    def _begin(self, path: Path, tokens: Sequence[int]) -> Restored:
        restored = self._cache.restore(tokens, salt=self._salt)
        if restored is None:
            raise CacheError(
                f"{path}: no room for {len(tokens)} tokens beside running requests",
                hint="let requests finish, or raise --kv-cache-tokens / --kv-cache-bytes",
            )
        self._engine.n_internal += 1
        return restored

    def _commit(self, restored: Restored, tokens: Sequence[int], n_losses: int) -> None:
        self._engine.require_no_loss(n_losses)
        self._cache.commit(restored.seq, tokens)

    def _end(self, held: Sequence[Restored]) -> None:
        for restored in held:
            self._engine.n_internal -= 1
            self._cache.free(restored.seq)

    def _read(self, file: SessionFile, layer: int, n_tokens: int, n_skipped: int) -> Iterator[Planes]:
        """K and V of the file's next layer, without the first `n_skipped` tokens; or its state."""
        for plane_sizes in self._exchange.part_sizes(layer, n_tokens):
            planes = {}
            for name, shape, dtype in plane_sizes:
                data = bytearray(file.part(math.prod(shape) * dtype.itemsize))
                planes[name] = torch.frombuffer(data, dtype=dtype).view(shape)[n_skipped:]
            yield planes

    def _check(self, path: Path, tokens: Sequence[int], n_ctx: int, n_vocab: int) -> None:
        if len(tokens) > n_ctx:
            raise CacheError(
                f"{path}: {len(tokens)} tokens do not fit into a context of {n_ctx}", hint="raise n_ctx (-c)"
            )
        if max(tokens) >= n_vocab:
            raise CacheError(f"{path}: token id {max(tokens)} is outside the vocabulary of {n_vocab}")
