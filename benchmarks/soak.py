"""A soak of the KV cache: random requests, forks, truncations and cancellations under a full pool.

    python -m benchmarks soak --minutes 10
    python -m benchmarks soak --steps 500 --seed 7      # the same every time
    python -m benchmarks soak --model model.gguf        # a real model, through motley.LLM

Without a model, a fake one stands in whose K/V is a digest of the past, and whose next token is a digest of all K/V
that it reads through the block tables. A block that is lost, shared wrongly or overwritten therefore changes a token,
and each finished request is compared with what it would have said alone. The cache's `check_integrity()` runs after
every step, and at the end nothing may be in use.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import count

from motley import LLM
from motley.engine.request import CANCELLED, Request, TextStream
from motley.engine.scheduler import Scheduler, Step
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy, GroupSpec
from motley.llm import Stream

BLOCK, WINDOW, VOCAB = 4, 11, 5
N_BLOCKS = 40
N_REQUEST = 60  # tokens of a request, at most: with what bare sequences take, one always fits
N_BARE, MAX_BARE = 40, 6  # tokens of all bare sequences, and how many there may be
Tokens = Sequence[int]


def digest(last: bytes, token: int) -> bytes:
    return blake2b(last + token.to_bytes(4, "little"), digest_size=8).digest()


class Silence:
    """A tokenizer of which no text is wanted."""

    eog_ids: frozenset[int] = frozenset()

    def stream(self, *, after: Iterable[int]) -> Silence:
        return self

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class FakeModel:
    """K/V in slots, written and read as the manager says: a group with full attention and one with a window."""

    windows = (None, WINDOW)

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.arenas = [[b""] * (N_BLOCKS * BLOCK) for _ in self.windows]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            arena, src, dst = self.arenas[copy.group], copy.src * BLOCK, copy.dst * BLOCK
            arena[dst : dst + copy.n_tokens] = arena[src : src + copy.n_tokens]

    def store(self, sequence: int, start: int, tokens: Tokens) -> None:
        """K/V of the next tokens, from the last K/V that is there."""
        for group, arena in enumerate(self.arenas):
            last = arena[self.slot(sequence, group, start - 1)] if start else b""
            for position, token in enumerate(tokens, start):
                last = digest(last, token)
                arena[self.slot(sequence, group, position)] = last

    def next_token(self, sequence: int, n_tokens: int) -> int:
        """From everything that the last position sees."""
        return choose(
            [
                [arena[self.slot(sequence, group, t)] for t in range(first_seen(window, n_tokens), n_tokens)]
                for group, (arena, window) in enumerate(zip(self.arenas, self.windows, strict=True))
            ]
        )

    def slot(self, sequence: int, group: int, position: int) -> int:
        block = self.cache.tables([sequence], group)[0].blocks[position // BLOCK]
        assert block >= 0, f"token {position} of sequence {sequence} is in a hole"
        return block * BLOCK + position % BLOCK


def first_seen(window: int | None, n_tokens: int) -> int:
    return 0 if window is None else max(0, n_tokens - window)


def choose(seen: Iterable[Iterable[bytes]]) -> int:
    return digest(b"".join(b"".join(group) for group in seen), 0)[0] % VOCAB


def answer_alone(prompt: Tokens, n_tokens: int) -> list[int]:
    """What the fake model says when nothing is paged, shared or preempted."""
    tokens = list(prompt)
    kvs = [reduce(digest, tokens[: i + 1], b"") for i in range(len(tokens))]
    for _ in range(n_tokens):
        tokens.append(choose(kvs[first_seen(window, len(kvs)) :] for window in FakeModel.windows))
        kvs.append(digest(kvs[-1], tokens[-1]))
    return tokens[len(prompt) :]


class Soak:
    """One step at a time; `seen` counts what has happened."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache = CacheManager([GroupSpec("full", N_BLOCKS), GroupSpec("window", N_BLOCKS, WINDOW)], BLOCK)
        self.model = FakeModel(self.cache)
        self.scheduler = Scheduler(self.cache, n_batch=8, n_parallel=6)
        self.requests: list[Request] = []
        self.bare: dict[int, list[int]] = {}  # sequences without a request, and their tokens
        self.ahead: Step | None = None  # what was foreseen, as the engine does
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        for act, odds in (
            (self.add, 0.25),
            (self.cancel, 0.03),
            (self.open_bare, 0.1),
            (self.change_bare, 0.5),
        ):
            if self.rng.random() < odds:
                act()
        if self.scheduler.has_work:
            self.run()
        self.cache.take_emptied()
        self.cache.check_integrity()
        self.seen["steps"] += 1

    def finish(self) -> None:
        """Let all requests end; nothing may be left over."""
        while self.scheduler.has_work:
            self.run()
        for sequence in list(self.bare):
            self.free_bare(sequence)
        self.cache.check_integrity()
        assert all(group.n_used == 0 for group in self.cache.stats().groups), "blocks have leaked"
        self.seen["evictions"] = self.cache.stats().prefix.n_evictions

    def add(self) -> None:
        if len(self.scheduler.waiting) > 6:
            return
        others = [r.tokens for r in self.requests[-20:]] + [[]]
        shared = self.rng.choice(others)
        prompt = [*shared[: self.rng.randint(0, 30)], *self.draw(self.rng.randint(1, 10))]
        request = Request(
            prompt=tuple(prompt),
            sampler=lambda logits, tokens: 0,
            text=TextStream(Silence(), (), ()),  # type: ignore[arg-type]
            stop_ids=frozenset(),
            max_tokens=self.rng.randint(1, N_REQUEST - len(prompt)),
        )
        self.scheduler.add(request)
        self.requests = [*self.requests[-20:], request]
        self.seen["requests"] += 1

    def cancel(self) -> None:
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        if alive:
            request = self.rng.choice(alive)
            self.scheduler.remove(request)
            request.finish(CANCELLED)
            self.seen["cancelled"] += 1

    def run(self) -> None:
        running = set(map(id, self.scheduler.running))
        if self.ahead is not None and self.scheduler.is_next(self.ahead):
            step = self.ahead
            self.seen["foreseen"] += 1
        else:
            step = self.scheduler.schedule()
        self.seen["preempted"] += len(running - set(map(id, self.scheduler.running)))
        self.model.copy(step.copies)
        for request, n_tokens in step.work:
            assert request.sequence is not None
            start = request.n_computed
            self.model.store(request.sequence, start, request.tokens[start : start + n_tokens])
        self.scheduler.complete(step)
        ready = [request for request, _ in step.work if not request.n_pending]
        tokens = [self.model.next_token(r.sequence, r.n_computed) for r in ready if r.sequence is not None]
        self.ahead = self.scheduler.foresee()  # drops what the next step does not see: this one has run
        for request, token in zip(ready, tokens, strict=True):
            request.accept(token)
            if request.is_finished:
                self.scheduler.remove(request)
                self.check(request)

    def check(self, request: Request) -> None:
        assert request.max_tokens is not None
        expected = answer_alone(request.prompt, request.max_tokens)
        assert request.generated == expected, f"a wrong token: {request.generated}, alone {expected}"
        self.seen["answers"] += 1

    def open_bare(self) -> None:
        if len(self.bare) == MAX_BARE:
            return
        tokens = self.draw(self.rng.randint(1, 12))
        opened = self.cache.open(tokens)
        self.model.copy(opened.copies)
        self.bare[opened.seq] = tokens[: opened.n_cached]
        self.extend_bare(opened.seq, tokens[opened.n_cached :])

    def change_bare(self) -> None:
        if not self.bare:
            return
        sequence = self.rng.choice(list(self.bare))
        tokens = self.bare[sequence]
        match self.rng.choice(["extend", "extend", "fork", "truncate", "free"]):
            case "extend":
                self.extend_bare(sequence, self.draw(self.rng.randint(1, 6)))
            case "fork" if self.n_bare + len(tokens) <= N_BARE and len(self.bare) < MAX_BARE:
                self.bare[self.cache.fork(sequence)] = list(tokens)
                self.seen["forks"] += 1
            case "truncate":
                n_kept = self.rng.randint(0, len(tokens))
                if self.cache.can_truncate(sequence, n_kept):
                    self.cache.truncate(sequence, n_kept)
                    del tokens[n_kept:]
                    self.seen["truncations"] += 1
            case "free":
                self.free_bare(sequence)

    def extend_bare(self, sequence: int, tokens: list[int]) -> None:
        known = self.bare[sequence]
        self.cache.advance(sequence, len(known))
        room = self.cache.reserve(sequence, len(tokens)) if self.n_bare + len(tokens) <= N_BARE else None
        if room is not None:
            self.model.copy(room)
            self.model.store(sequence, len(known), tokens)
            self.cache.commit(sequence, tokens)
            known += tokens

    def free_bare(self, sequence: int) -> None:
        """After a look at all that it has."""
        tokens = self.bare.pop(sequence)
        for t in range(len(tokens)):
            found = self.model.arenas[0][self.model.slot(sequence, 0, t)]
            assert found == reduce(digest, tokens[: t + 1], b""), "a bare sequence has another's K/V"
        self.cache.free(sequence)
        self.seen["bare sequences"] += 1

    @property
    def n_bare(self) -> int:
        return sum(map(len, self.bare.values()))

    def draw(self, n: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(n)]


def soak_model(model: str, seed: int, n_answers: int) -> Counter[str]:
    """Streams through a real model whose cache is far too small, each compared with its answer alone."""
    rng, seen = random.Random(seed), Counter[str]()
    with LLM(model, n_ctx=96, kv_block_size=8, n_parallel=1, backend="reference", prefix_cache=False) as solo:
        vocabulary = min(solo.tokenizer.n_vocab, 200)
        prompts = [[rng.randrange(3, vocabulary) for _ in range(rng.randint(2, 30))] for _ in range(6)]
        asks = [(prompt, rng.randint(3, 40)) for prompt in prompts]
        alone = [solo.generate(p, max_tokens=n, temperature=0, ignore_eos=True).tokens for p, n in asks]
    with LLM(model, n_ctx=96, kv_block_size=8, kv_cache_tokens=104, n_parallel=4, backend="reference") as llm:
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
            llm._cache.check_integrity()
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
