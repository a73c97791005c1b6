"""Save a sequence's cache to a file, and bring it back: under any split and crew of the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch

from motley.errors import CacheError
from motley.kvcache.manager import CacheManager
from motley.kvcache.session_file import Contents, Identity, SessionFile, write_session
from motley.runtime.exchange import CacheExchange, Planes, to_bytes


class SessionStore:
    """Between files and the cache. Engine thread only."""

    def __init__(
        self, identity: Identity, exchange: CacheExchange, cache: CacheManager, groups: Sequence[int]
    ) -> None:
        """`groups`: of each layer, the number of its group."""
        self._identity = identity
        self._exchange = exchange
        self._cache = cache
        self._groups = groups

    def save(self, path: Path, sequence: int, tokens: Sequence[int]) -> int:
        """Write the cache of a sequence, which has just these tokens; returns bytes."""
        views = [self._cache.stored_slots(sequence, group) for group in range(len(self._cache.groups))]
        firsts = tuple(views[group][0] for group in self._groups)

        def parts() -> Iterator[bytes]:
            for layer, group in enumerate(self._groups):
                yield from map(to_bytes, self._exchange.read(layer, views[group][1]))

        return write_session(path, self._identity, Contents(tuple(tokens), firsts), parts())

    def load(self, path: Path, n_ctx: int, n_vocab: int) -> list[int]:
        """Put a file's tokens into the prefix cache, where whoever begins with them finds them; returns them."""
        with closing(SessionFile(path, self._identity)) as file:
            tokens, firsts = file.contents.tokens, file.contents.firsts
            self._check(path, tokens, n_ctx, n_vocab)
            self._cache.require_fit(len(tokens), 1)
            restored = self._cache.restore(tokens)
            if restored is None:
                raise CacheError(
                    f"{path}: no room for {len(tokens)} tokens beside running requests",
                    hint="let requests finish, or raise --kv-cache-tokens / --kv-cache-bytes",
                )
            try:
                for layer, group in enumerate(self._groups):
                    n_skipped = restored.firsts[group] - firsts[layer]
                    if n_skipped < 0:
                        raise CacheError(
                            f"{path}: layer {layer} has tokens from {firsts[layer]} on, but a cache with blocks of "
                            f"{self._cache.block_size} needs them from {restored.firsts[group]} on",
                            hint="load it with the --kv-block-size that it was saved with, or a smaller one",
                        )
                    planes = list(self._read(file, len(tokens) - firsts[layer], n_skipped))
                    self._exchange.write(layer, restored.slots[group], planes)
                file.require_end()
                self._cache.commit(restored.seq, tokens)
            finally:
                self._cache.free(restored.seq)
        return list(tokens)

    def _read(self, file: SessionFile, n_tokens: int, n_skipped: int) -> Iterator[Planes]:
        """K and V of the file's next layer, without the first `n_skipped` tokens."""
        for plane_sizes in self._exchange.part_sizes(n_tokens):
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
