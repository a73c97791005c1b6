"""Soak test of engine and KV cache: random requests, forks, truncations, cancellations and failures under a full pool.

    python -m benchmarks soak --minutes 10
    python -m benchmarks soak --steps 500 --seed 7      # the same every time
    python -m benchmarks soak --model model.gguf        # a real model, through motley.LLM

Without a model, a fake one is used: its K/V is a digest of all earlier tokens, and its next token is a digest of all
K/V that it reads through the block tables. A block that is lost, shared wrongly or overwritten therefore changes a
token. Each finished request is compared with the answer of the same request run alone. One run in fifty fails at a
random point, and some requests make every run fail that contains them: only such requests, and requests that failed
twice, may end without an answer. `check_integrity()` of the cache runs after every step, and at the end no block may
be in use.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from itertools import count
from typing import Any

import torch

from motley import LLM, SamplingParams
from motley.engine import Engine, Request, Stream
from motley.engine.request import CANCELLED, FAILED
from motley.errors import CacheError, DeviceError
from motley.kvcache.leases import Lease
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy, GroupSpec
from motley.runtime import Batch

BLOCK, WINDOW, VOCAB = 4, 11, 5
POISON = VOCAB  # a token that makes every run fail
N_BLOCKS = 40
N_REQUEST = 60  # maximum tokens of a request: one always fits, also with all raw sequences in the pool
N_RAW, MAX_RAW = 40, 6  # maximum tokens of all raw sequences together, and maximum number of them
Tokens = Sequence[int]


def digest(last: bytes, token: int) -> bytes:
    return blake2b(last + token.to_bytes(4, "little"), digest_size=8).digest()


class Silence:
    """A tokenizer that returns empty text for every token."""

    eog_ids: frozenset[int] = frozenset()

    def stream(self, *, after: Iterable[int], skip_special: bool = True) -> Silence:
        return self

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Placed:
    """Block tables of a batch: for each chunk and group, a copy of the sequence's blocks at the time of the call."""

    batch: Batch
    blocks: list[list[list[int]]]


class FakeRunner:
    """K/V in slots given by the cache manager: a group with full attention and one with a window.

    Replaces `runtime.Runner` in the engine. Some runs fail before, between or after the writes.
    """

    windows = (None, WINDOW)
    is_broken_off = False
    sends_rows = False
    is_demand_paged = True  # `give_back` is called
    can_chain = False
    n_plans = 0
    hidden = None

    def __init__(self, cache: CacheManager, rng: random.Random, failure_odds: float = 0.0) -> None:
        self.cache = cache
        self.arenas = [[b""] * (N_BLOCKS * BLOCK) for _ in self.windows]
        self.n_failures = self.n_steady = self.n_rounds = 0
        self._rng = rng
        self._failure_odds = failure_odds

    def place(self, batch: Batch, cache: CacheManager) -> Placed:
        sequences = [chunk.sequence for chunk in batch.chunks]
        groups = [
            [list(view.blocks) for view in cache.tables(sequences, g)] for g in range(len(self.windows))
        ]
        return Placed(batch, [list(blocks) for blocks in zip(*groups, strict=True)])

    def steady(self, placed: Placed, settings: Sequence[Any]) -> FakeSteady:
        assert all(chunk.n_tokens == chunk.n_outputs == 1 for chunk in placed.batch.chunks)
        return FakeSteady(self)

    def draw_failure(self) -> int | None:
        """The point at which the next run fails; None: it does not."""
        return self._rng.randint(0, 3) if self._rng.random() < self._failure_odds else None

    def run(self, placed: Placed, tokens: Tokens, copies: Sequence[BlockCopy]) -> torch.Tensor:
        fails_at = self.draw_failure()
        self.maybe_fail(fails_at, 0)
        self.copy(copies)
        self.maybe_fail(fails_at, 1)
        if POISON in tokens:
            raise MemoryError("no plan for poison")
        rows, first = [], 0
        for chunk, blocks in zip(placed.batch.chunks, placed.blocks, strict=True):
            self.store(blocks, chunk.start, tokens[first : first + chunk.n_tokens])
            self.maybe_fail(fails_at, 2)
            if chunk.n_outputs:
                rows.append(self.next_token(blocks, chunk.start + chunk.n_tokens))
            first += chunk.n_tokens
        self.maybe_fail(fails_at, 3)
        logits = torch.zeros(len(rows), POISON + 1)
        logits[range(len(rows)), rows] = 1.0
        return logits

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        assert len(emptied) == len(self.windows)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            arena, src, dst = self.arenas[copy.group], copy.src * BLOCK, copy.dst * BLOCK
            arena[dst : dst + copy.n_tokens] = arena[src : src + copy.n_tokens]

    def store(self, blocks: Sequence[Sequence[int]], start: int, tokens: Tokens) -> None:
        """Write K/V of the next tokens, computed from the last stored K/V. `blocks`: the sequence's, for each group."""
        for arena, table in zip(self.arenas, blocks, strict=True):
            last = arena[slot(table, start - 1)] if start else b""
            for position, token in enumerate(tokens, start):
                last = digest(last, token)
                arena[slot(table, position)] = last

    def next_token(self, blocks: Sequence[Sequence[int]], n_tokens: int) -> int:
        """The next token, computed from all K/V that the last position attends to."""
        return choose(
            [arena[slot(table, t)] for t in range(first_seen(window, n_tokens), n_tokens)]
            for arena, window, table in zip(self.arenas, self.windows, blocks, strict=True)
        )

    def blocks_of(self, sequence: int) -> list[list[int]]:
        return [list(self.cache.tables([sequence], group)[0].blocks) for group in range(len(self.windows))]

    def maybe_fail(self, fails_at: int | None, here: int) -> None:
        if fails_at == here:
            self.n_failures += 1
            raise self._rng.choice([DeviceError, MemoryError, KeyboardInterrupt, AssertionError])("injected")


class FakeSteady:
    """Replaces `runtime.SteadyRun`: it knows the block tables as they were when it was told of them."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._blocks: list[list[list[int]]] = []  # of each sequence, for each group
        self.is_current = True

    def place(self, lease: Lease) -> None:
        groups = [[[-1] * (t.first // BLOCK) + list(t.blocks) for t in group] for group in lease.tables]
        self._blocks = [list(blocks) for blocks in zip(*groups, strict=True)]

    def run(
        self,
        tokens: list[int],
        positions: list[int],
        indexes: list[int],
        n_rounds: int = 1,
        stops: Sequence[int] = (),
    ) -> list[list[int]]:
        rounds: list[list[int]] = []
        for n in range(n_rounds):
            rounds.append(self._round(rounds[-1] if rounds else tokens, [p + n for p in positions]))
            if not set(stops).isdisjoint(rounds[-1]):
                break
        self._runner.n_rounds += len(rounds) - 1
        return rounds

    def _round(self, tokens: list[int], positions: list[int]) -> list[int]:
        runner = self._runner
        fails_at = runner.draw_failure()
        runner.maybe_fail(fails_at, 0)
        if POISON in tokens:
            raise MemoryError("no plan for poison")
        for blocks, token, position in zip(self._blocks, tokens, positions, strict=True):
            runner.store(blocks, position, [token])
            runner.maybe_fail(fails_at, 1)
        runner.n_steady += 1
        runner.maybe_fail(fails_at, 2)
        self.is_current = fails_at != 3
        ends = zip(self._blocks, positions, strict=True)
        return [runner.next_token(blocks, position + 1) for blocks, position in ends]


def slot(blocks: Sequence[int], position: int) -> int:
    block = blocks[position // BLOCK]
    assert block >= 0, f"token {position} is in a hole"
    return block * BLOCK + position % BLOCK


def first_seen(window: int | None, n_tokens: int) -> int:
    return 0 if window is None else max(0, n_tokens - window)


def choose(seen: Iterable[Iterable[bytes]]) -> int:
    return digest(b"".join(b"".join(group) for group in seen), 0)[0] % VOCAB


def answer_alone(prompt: Tokens, n_tokens: int) -> list[int]:
    """The fake model's answer without paging, sharing or preemption."""
    tokens = list(prompt)
    kvs = [reduce(digest, tokens[: i + 1], b"") for i in range(len(tokens))]
    for _ in range(n_tokens):
        tokens.append(choose(kvs[first_seen(window, len(kvs)) :] for window in FakeRunner.windows))
        kvs.append(digest(kvs[-1], tokens[-1]))
    return tokens[len(prompt) :]


class Soak:
    """Runs a real engine step by step; `seen` counts events by kind."""

    def __init__(self, seed: int, failure_odds: float = 0.02) -> None:
        self.rng = random.Random(seed)
        self.cache = CacheManager([GroupSpec("full", N_BLOCKS), GroupSpec("window", N_BLOCKS, WINDOW)], BLOCK)
        self.model = FakeRunner(self.cache, self.rng, failure_odds)
        self.engine = Engine(
            self.model,  # type: ignore[arg-type]
            self.cache,
            Silence(),  # type: ignore[arg-type]
            n_ctx=N_REQUEST,
            n_vocab=POISON + 1,
            n_batch=8,
            n_parallel=6,
            clock=self.tick,
        )
        self.now = 0.0
        self.requests: list[Request] = []
        self.raw: dict[int, list[int]] = {}  # sequences without a request, and their tokens
        self.seen: Counter[str] = Counter()

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    def step(self) -> None:
        for act, odds in (
            (self.add, 0.25),
            (self.cancel, 0.03),
            (self.open_raw, 0.1),
            (self.change_raw, 0.5),
        ):
            if self.rng.random() < odds:
                act()
        self.run()
        self.seen["steps"] += 1

    def finish(self) -> None:
        """Run all requests to the end; no block may remain in use."""
        while self.engine.has_work:
            self.run()
        for sequence in list(self.raw):
            self.free_raw(sequence)
        self.cache.check_integrity()
        assert all(group.n_used == 0 for group in self.cache.stats().groups), "blocks have leaked"
        self.seen["evictions"] = self.cache.stats().prefix.n_evictions
        self.seen["failed steps"] = self.model.n_failures
        self.seen["steady steps"] = self.model.n_steady
        self.seen["further rounds of a call"] = self.model.n_rounds

    def add(self) -> None:
        if len(self.engine.scheduler.waiting) > 6:
            return
        others = [[t for t in r.tokens if t != POISON] for r in self.requests[-20:]] + [[]]
        shared = self.rng.choice(others)
        prompt = [*shared[: self.rng.randint(0, 30)], *self.draw(self.rng.randint(1, 10))]
        if self.rng.random() < 0.08:
            prompt.append(POISON)
        params = SamplingParams(temperature=0, max_tokens=self.rng.randint(1, N_REQUEST - len(prompt)))
        self.requests.append(self.engine.add(prompt, params))
        self.seen["requests"] += 1

    def cancel(self) -> None:
        if alive := self.engine.scheduler.requests:
            self.engine.cancel(self.rng.choice(alive))

    def run(self) -> None:
        if self.engine.can_step:
            self.engine.step(self.rng.choice((0.0, 1.0)))  # 1.0: time for several rounds of a call
        self.cache.check_integrity()
        for request in [request for request in self.requests if request.is_finished]:
            self.requests.remove(request)
            self.check(request)

    def check(self, request: Request) -> None:
        answer = request.outbox.result()
        self.seen["preempted"] += answer.timings.n_preemptions
        self.seen["retried"] += answer.timings.n_retries
        if answer.finish_reason == CANCELLED:
            self.seen["cancelled"] += 1
            return
        if POISON in request.prompt or isinstance(answer.error, CacheError):
            assert answer.finish_reason == FAILED, "poison was answered"
            self.seen["failed alone"] += 1
            return
        if answer.finish_reason == FAILED:  # two failures in a row, the second one in a batch of its own
            assert answer.timings.n_retries, "a request failed at once"
            self.seen["failed twice"] += 1
            return
        assert request.max_tokens is not None
        expected = answer_alone(request.prompt, request.max_tokens)
        assert request.generated == expected, f"a wrong token: {request.generated}, alone {expected}"
        self.seen["answers"] += 1

    def open_raw(self) -> None:
        if len(self.raw) == MAX_RAW:
            return
        tokens = self.draw(self.rng.randint(1, 12))
        opened = self.cache.open(tokens)
        self.model.copy(opened.copies)
        self.raw[opened.seq] = tokens[: opened.n_cached]
        self.extend_raw(opened.seq, tokens[opened.n_cached :])

    def change_raw(self) -> None:
        if not self.raw:
            return
        sequence = self.rng.choice(list(self.raw))
        tokens = self.raw[sequence]
        match self.rng.choice(["extend", "extend", "fork", "truncate", "free"]):
            case "extend":
                self.extend_raw(sequence, self.draw(self.rng.randint(1, 6)))
            case "fork" if self.n_raw + len(tokens) <= N_RAW and len(self.raw) < MAX_RAW:
                self.raw[self.cache.fork(sequence)] = list(tokens)
                self.seen["forks"] += 1
            case "truncate":
                n_kept = self.rng.randint(0, len(tokens))
                if self.cache.can_truncate(sequence, n_kept):
                    self.cache.truncate(sequence, n_kept)
                    del tokens[n_kept:]
                    self.seen["truncations"] += 1
            case "free":
                self.free_raw(sequence)

    def extend_raw(self, sequence: int, tokens: list[int]) -> None:
        known = self.raw[sequence]
        self.cache.advance(sequence, len(known))
        room = self.cache.reserve(sequence, len(tokens)) if self.n_raw + len(tokens) <= N_RAW else None
        if room is not None:
            self.model.copy(room)
            self.model.store(self.model.blocks_of(sequence), len(known), tokens)
            self.cache.commit(sequence, tokens)
            known += tokens

    def free_raw(self, sequence: int) -> None:
        """Check all K/V of a raw sequence, then free it."""
        tokens = self.raw.pop(sequence)
        blocks = self.model.blocks_of(sequence)[0]
        for t in range(len(tokens)):
            found = self.model.arenas[0][slot(blocks, t)]
            assert found == reduce(digest, tokens[: t + 1], b""), "a raw sequence has another's K/V"
        self.cache.free(sequence)
        self.seen["raw sequences"] += 1

    @property
    def n_raw(self) -> int:
        return sum(map(len, self.raw.values()))

    def draw(self, n: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(n)]


def soak_model(model: str, seed: int, n_answers: int) -> Counter[str]:
    """Run streams on a real model with a cache that is far too small; compare each with its answer when run alone."""
    rng, seen = random.Random(seed), Counter[str]()
    with LLM(
        model, n_ctx=96, kv_block_size=8, n_parallel=1, backend="reference", spec="off", prefix_cache=False
    ) as solo:
        vocabulary = min(solo.tokenizer.n_vocab, 200)
        prompts = [[rng.randrange(3, vocabulary) for _ in range(rng.randint(2, 30))] for _ in range(6)]
        asks = [(prompt, rng.randint(3, 40)) for prompt in prompts]
        alone = [solo.generate(p, max_tokens=n, temperature=0, ignore_eos=True).tokens for p, n in asks]
    with LLM(
        model, n_ctx=96, kv_block_size=8, kv_cache_tokens=104, n_parallel=4, backend="reference", spec="off"
    ) as llm:
        streams: list[tuple[int, Stream]] = []
        while seen["answers"] < n_answers:
            if len(streams) < 5:
                i = rng.randrange(len(asks))
                prompt, n = asks[i]
                streams.append((i, llm.stream(prompt, max_tokens=n, temperature=0, ignore_eos=True)))
            i, stream = streams.pop(rng.randrange(len(streams)))
            if rng.random() < 0.02:
                stream.close()
                seen["cancelled"] += 1
            elif next(stream, None) is not None:
                streams.append((i, stream))
            else:
                assert stream.completion.tokens == alone[i], "a wrong token"
                seen["answers"] += 1
            llm._call(llm._loaded.cache.check_integrity)
            seen["steps"] += 1
        for _, stream in streams:
            stream.close()
        assert llm.kv_stats().n_blocks_used == 0, "blocks have leaked"
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, help="so many, in place of --minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="soak a real model, for --steps answers")
    chosen = parser.parse_args()
    if chosen.model:
        seen = soak_model(chosen.model, chosen.seed, chosen.steps or 100)
    else:
        soak, end = Soak(chosen.seed), time.monotonic() + 60 * chosen.minutes
        for n in count():
            if n == chosen.steps or (chosen.steps is None and time.monotonic() > end):
                break
            soak.step()
        soak.finish()
        seen = soak.seen
    print(json.dumps(dict(sorted(seen.items()))))


if __name__ == "__main__":
    main()
