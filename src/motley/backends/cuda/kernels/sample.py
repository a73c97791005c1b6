"""The next token of each row of logits, chosen on the GPU. Reference: `motley.engine.sampling`, step by step.

Nothing is sorted. A filter is a threshold: of the logit (top-k, top-p, min-p) or of the distance to the entropy
(typical).
A threshold is the largest number T for which the candidates at or above it reach a given count or mass; its bits are
determined four at a time, from sums over the candidates. The draw is the argmax of logit / temperature + noise.

    edit      bias and penalties, in place on the logits: one entry for each (row, token) that has any
    survey    for each chunk of 256 tokens: its largest logit and its mass; without filters also its best draw
    collect   for each part of 8192 tokens: its candidates, in the order of their ids
    choose    one program per row: all its candidates at once in registers, thresholds, the draw

Candidates are the tokens at or above a lower bound of all tokens that pass the filters: the k-th largest of the chunks'
largest logits (k tokens are at or above it), or min-p's bound. If there are too many, or if there is no such bound, the
row's program goes over the whole row again and again: a hundred times slower, with the same result.
With top-p alone no threshold is needed. The best draw of all tokens is the best of those that pass, if it passes: if
the mass of the tokens above it is less than top-p's. Otherwise it was too unlikely, so that all tokens that pass are
above it, and the best draw of these is next. That is rarely needed: a draw fails with a probability of 1 - top-p.
Sums are float32, in a fixed order: the same row gives the same token, in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from motley.backends.cuda.kernels.noise import noise_of, noise_of_run

CHUNK = 256  # tokens per chunk; the largest logit of each chunk is stored
CHUNKS_AT_ONCE = 8  # chunks per program of `survey`
PART = 8192  # tokens that a program of `collect` goes over
CAPACITY = 1024  # maximum number of collected candidates
ROW_WORDS = 16  # words of a row's parameters: see `sampler`
EDIT_WORDS = 4
NONE_LEFT, NOT_FINITE = -1, -2  # in place of a token id: every logit is -inf; a logit is NaN or +inf

# How candidates are found.
GREEDY, UNFILTERED, BY_DRAWS, BY_PEAKS, BY_MIN_P, WHOLE_ROW = range(6)

_COUNT, _MASS, _TYPICAL = (tl.constexpr(i) for i in range(3))
_GREEDY, _BY_DRAWS = tl.constexpr(GREEDY), tl.constexpr(BY_DRAWS)
_BY_PEAKS, _BY_MIN_P, _WHOLE_ROW = (tl.constexpr(i) for i in (BY_PEAKS, BY_MIN_P, WHOLE_ROW))
_ROW, _EDIT = tl.constexpr(ROW_WORDS), tl.constexpr(EDIT_WORDS)
_NONE_LEFT, _NOT_FINITE = tl.constexpr(NONE_LEFT), tl.constexpr(NOT_FINITE)
_LAST_ID = tl.constexpr(2**31 - 1)
_ALL = tl.constexpr(-(2**31))  # a threshold that keeps everything


@triton.jit
def _number(words, i: tl.constexpr):
    """Word i of a row's parameters, reinterpreted as float32."""
    return tl.load(words + i).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n_edits"])
def _edit(logits, stride, rows, edits, n_edits, N: tl.constexpr):
    """logit + bias, then: repeat (a positive logit is divided, a negative one multiplied), frequency, presence."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    ok = i < n_edits
    entry = edits + i * _EDIT
    row, token = tl.load(entry, ok, other=0).to(tl.int64), tl.load(entry + 1, ok, other=0)
    count = tl.load(entry + 2, ok, other=0)
    bias = tl.load(entry + 3, ok, other=0).to(tl.float32, bitcast=True)
    words = rows + row * _ROW
    repeat = tl.load(words + 4, ok, other=0).to(tl.float32, bitcast=True)
    frequency = tl.load(words + 5, ok, other=0).to(tl.float32, bitcast=True)
    presence = tl.load(words + 6, ok, other=0).to(tl.float32, bitcast=True)
    x = tl.load(logits + row * stride + token, ok, other=0.0) + bias
    pushed = tl.where(x > 0, x / repeat, x * repeat) - count.to(tl.float32) * frequency - presence
    tl.store(logits + row * stride + token, tl.where(count > 0, pushed, x), ok)


@triton.jit
def _survey(
    logits, stride, n_vocab, rows, peaks, masses, scores, ids, n_chunks, CHUNK: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Store peak and mass of N chunks of one row. A peak of +inf means that a logit is NaN or +inf."""
    row, first = tl.program_id(0), tl.program_id(1) * N
    chunk = first + tl.arange(0, N)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row.to(tl.int64) * stride + token, token < n_vocab, other=-float("inf"))
    is_bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 1)
    peak = tl.where(is_bad > 0, float("inf"), tl.max(x, 1))
    base = tl.where(peak == -float("inf"), 0.0, peak)[:, None]
    at, ok = row * n_chunks + chunk, chunk < n_chunks
    tl.store(peaks + at, peak, ok)
    tl.store(masses + at, tl.sum(tl.exp(x - base), 1), ok)
    words = rows + row * _ROW
    mode = tl.load(words + 11)
    if mode <= _BY_DRAWS:
        score = x - base
        if mode != _GREEDY:
            k0, k1 = (
                tl.load(words + 8).to(tl.uint32, bitcast=True),
                tl.load(words + 9).to(tl.uint32, bitcast=True),
            )
            index = tl.load(words + 10).to(tl.uint32, bitcast=True)
            noise = noise_of_run(first * CHUNK, k0, k1, index, N * CHUNK)
            score = score / tl.maximum(_number(words, 0), 1e-30) + tl.reshape(noise, [N, CHUNK])
        best = tl.max(score, 1)
        tl.store(scores + at, best, ok)
        tl.store(ids + at, tl.min(tl.where(score == best[:, None], token, _LAST_ID), 1), ok)


@triton.jit
def _ordered(x):
    """Floats as int32 with the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0 changes -0.0 to +0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _distance(x, top, log_total, entropy):
    """The distance between a candidate's surprise (-log probability) and the entropy."""
    return tl.abs(log_total - (x - top) - entropy)


@triton.jit
def _threshold(
    source, n, target, least, nearest, top, log_total, entropy, BY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest T so that the candidates at or above T reach `target`: in number, or in mass e^(x - top).

    Only candidates whose ordered logit is at least `least` and whose ordered -distance is at least `nearest` count. T
    is an ordered logit, or (_TYPICAL) an ordered -distance. If all of them together do not reach it, T keeps all.
    """
    low = tl.full([], -(2**31), tl.int32)
    for digit in range(8):
        step = low + (tl.arange(0, 16) << (28 - 4 * digit))
        reached = tl.zeros([16], tl.float32)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(source + i, i < n, other=-float("inf"))
            key = _ordered(x)
            ok = (key >= least) & (x > -float("inf"))
            if BY == _COUNT:
                weight = tl.where(ok, 1.0, 0.0)
            else:
                farness = _ordered(-_distance(x, top, log_total, entropy))
                weight = tl.where(ok & (farness >= nearest), tl.exp(x - top), 0.0)
                if BY == _TYPICAL:
                    key = farness
            reached += tl.sum(tl.where(key[None, :] >= step[:, None], weight[None, :], 0.0), 1)
        # Sums decrease from step to step, and the first one is known to reach the target.
        n_enough = tl.maximum(tl.sum((reached >= target).to(tl.int32), 0), 1)
        low += (n_enough - 1) << (28 - 4 * digit)
    return low


@triton.jit
def _mass(source, n, least, top, BLOCK: tl.constexpr):
    """Σ e^(x - top) and Σ (x - top) e^(x - top) of candidates whose ordered logit is at least `least`."""
    mass, moment = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(source + i, i < n, other=-float("inf"))
        ok = (_ordered(x) >= least) & (x > -float("inf"))
        below = tl.where(ok, x - top, 0.0)
        weight = tl.where(ok, tl.exp(below), 0.0)
        mass += weight
        moment += weight * below
    return tl.sum(mass, 0), tl.sum(moment, 0)


@triton.jit
def _bound(peaks, n_chunks, words, CHUNKS: tl.constexpr):
    """A lower bound of the logits of all tokens that pass the row's filters."""
    mode, c = tl.load(words + 11), tl.arange(0, CHUNKS)
    peak = tl.load(peaks + c, c < n_chunks, other=-float("inf"))
    top = tl.max(peak, 0)
    bound = top + _number(words, 2) - 1e-3  # min-p's; the exact test follows later
    if mode == _BY_PEAKS:
        key = _ordered(peak)
        low = _largest(key, tl.where(peak > -float("inf"), 1.0, 0.0), tl.load(words + 7).to(tl.float32))
        bound = tl.min(tl.where(key >= low, peak, float("inf")), 0)
    return bound


@triton.jit
def _collect(
    logits, stride, n_vocab, rows, peaks, n_chunks, values, ids, counts,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the candidates of one part of a row, by id, and their number, which may exceed CAPACITY."""
    row, part = tl.program_id(0), tl.program_id(1)
    words = rows + row * _ROW
    mode = tl.load(words + 11)
    if mode <= _BY_DRAWS or mode == _WHOLE_ROW:
        return
    bound = _bound(peaks + row * n_chunks, n_chunks, words, CHUNKS)
    PER: tl.constexpr = BLOCK // CHUNK
    place = row * tl.num_programs(1) + part
    values += place.to(tl.int64) * CAPACITY
    ids += place.to(tl.int64) * CAPACITY
    row_logits = logits + row.to(tl.int64) * stride
    # Of tokens at the bound itself, top-k takes the first by id: more of them than k are not needed.
    max_equal = tl.where(mode == _BY_PEAKS, tl.load(words + 7), n_vocab)
    n, n_equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, n_vocab), BLOCK):
        chunk = start // CHUNK + tl.arange(0, PER)
        highest = tl.max(tl.load(peaks + row * n_chunks + chunk, chunk < n_chunks, other=-float("inf")), 0)
        if highest >= bound:
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_logits + token, token < n_vocab, other=-float("inf"))
            is_equal = (x == bound).to(tl.int32)
            rank = n_equal + tl.cumsum(is_equal, 0)
            is_one = ((x > bound) | ((x == bound) & (rank <= max_equal))) & (x > -float("inf"))
            n_equal += tl.sum(is_equal, 0)
            at = n + tl.cumsum(is_one.to(tl.int32), 0) - 1
            ok = is_one & (at < CAPACITY)
            tl.store(values + at, x, ok)
            tl.store(ids + at, token, ok)
            n += tl.sum(is_one.to(tl.int32), 0)
    tl.store(counts + place, n)


@triton.jit
def _largest(key, weight, target):
    """The largest T so that the weights of keys at or above T sum to `target`; if all do not, T keeps all."""
    low = tl.full([], -(2**31), tl.int32)
    for digit in range(8):
        step = low + (tl.arange(0, 16) << (28 - 4 * digit))
        reached = tl.sum(tl.where(key[None, :] >= step[:, None], weight[None, :], 0.0), 1)
        # Sums decrease from step to step, and the first one is known to reach the target.
        n_enough = tl.maximum(tl.sum((reached >= target).to(tl.int32), 0), 1)
        low += (n_enough - 1) << (28 - 4 * digit)
    return low


@triton.jit
def _joined(values, ids, counts, n_parts, PARTS: tl.constexpr, CAPACITY: tl.constexpr):
    """The candidates of all parts (CAPACITY,), -inf where there are no more, and their token ids."""
    p, i = tl.arange(0, PARTS), tl.arange(0, CAPACITY)
    count = tl.load(counts + p, p < n_parts, other=0)
    end = tl.cumsum(count, 0)
    is_before = end[None, :] <= i[:, None]  # (candidates, parts)
    part = tl.sum(is_before.to(tl.int32), 1)
    start = tl.max(tl.where(is_before, end[None, :], 0), 1)
    is_one = i < tl.sum(count, 0)
    at = part * CAPACITY + i - start
    x = tl.load(values + at, is_one, other=-float("inf"))
    return x, tl.load(ids + at, is_one, other=0)


@triton.jit
def _drawn(x, token, words, top, total):
    """The token drawn from candidates x by ascending id, all in registers; -inf is no candidate.

    `total`: the mass that top-p refers to if it is larger than the candidates' mass; otherwise 0.
    """
    top_k, typical_p, top_p = tl.load(words + 7), _number(words, 3), _number(words, 1)
    log_min_p, t = _number(words, 2), tl.maximum(_number(words, 0), 1e-30)
    key, ok = _ordered(x), x > -float("inf")
    if top_k > 0:  # of equal logits, the first by id
        least = _largest(key, tl.where(ok, 1.0, 0.0), top_k.to(tl.float32))
        is_equal = (ok & (key == least)).to(tl.int32)
        n_above = tl.sum((ok & (key > least)).to(tl.int32), 0)
        ok &= (key > least) | ((key == least) & (tl.cumsum(is_equal, 0) <= top_k - n_above))
    below = tl.where(ok, x - top, 0.0)
    if typical_p < 1:
        weight = tl.where(ok, tl.exp(below), 0.0)
        mass = tl.sum(weight, 0)
        log_total = tl.log(mass)
        entropy = log_total - tl.sum(weight * below, 0) / mass
        nearness = _ordered(-_distance(x, top, log_total, entropy))
        ok &= nearness >= _largest(nearness, weight, tl.maximum(typical_p, 1e-37) * mass)
    if top_p < 1:
        weight = tl.where(ok, tl.exp(below), 0.0)
        target = tl.maximum(top_p, 1e-37) * tl.maximum(tl.sum(weight, 0), total)
        ok &= key >= _largest(key, weight, target)
    best_left = tl.max(tl.where(ok, x, -float("inf")), 0)  # typical may have removed the largest logit
    ok &= x >= best_left + log_min_p
    k0, k1 = tl.load(words + 8).to(tl.uint32, bitcast=True), tl.load(words + 9).to(tl.uint32, bitcast=True)
    index = tl.load(words + 10).to(tl.uint32, bitcast=True)
    score = tl.where(ok, (x - best_left) / t + noise_of(token, k0, k1, index), -float("inf"))
    return tl.min(tl.where((score == tl.max(score, 0)) & ok, token, _LAST_ID), 0)


@triton.jit
def _survivor(source, n, words, top, BLOCK: tl.constexpr):
    """The token drawn from a whole row, source[0 … n]."""
    top_k, typical_p, top_p = tl.load(words + 7), _number(words, 3), _number(words, 1)
    log_min_p, t = _number(words, 2), tl.maximum(_number(words, 0), 1e-30)
    least, nearest = tl.full([], -(2**31), tl.int32), tl.full([], -(2**31), tl.int32)
    log_total, entropy = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    if top_k > 0:
        least = _threshold(source, n, top_k.to(tl.float32), least, nearest, top, 0.0, 0.0, _COUNT, BLOCK)
    if typical_p < 1:
        mass, moment = _mass(source, n, least, top, BLOCK)
        log_total = tl.log(mass)
        entropy = log_total - moment / mass
        target = tl.maximum(typical_p, 1e-37) * mass
        nearest = _threshold(source, n, target, least, nearest, top, log_total, entropy, _TYPICAL, BLOCK)
    if top_p < 1:
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(source + i, i < n, other=-float("inf"))
            ok = (_ordered(x) >= least) & (_ordered(-_distance(x, top, log_total, entropy)) >= nearest)
            mass += tl.where(ok & (x > -float("inf")), tl.exp(x - top), 0.0)
        target = tl.maximum(top_p, 1e-37) * tl.sum(mass, 0)
        least = tl.maximum(
            least, _threshold(source, n, target, least, nearest, top, log_total, entropy, _MASS, BLOCK)
        )
    best_left = tl.full([], -float("inf"), tl.float32)  # typical may have removed the largest logit
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(source + i, i < n, other=-float("inf"))
        ok = (_ordered(x) >= least) & (_ordered(-_distance(x, top, log_total, entropy)) >= nearest)
        best_left = tl.maximum(best_left, tl.max(tl.where(ok, x, -float("inf")), 0))
    k0, k1 = tl.load(words + 8).to(tl.uint32, bitcast=True), tl.load(words + 9).to(tl.uint32, bitcast=True)
    index = tl.load(words + 10).to(tl.uint32, bitcast=True)
    best, chosen = tl.full([], -float("inf"), tl.float32), tl.full([], 2**31 - 1, tl.int32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(source + i, i < n, other=-float("inf"))
        ok = (_ordered(x) >= least) & (_ordered(-_distance(x, top, log_total, entropy)) >= nearest)
        ok &= (x >= best_left + log_min_p) & (x > -float("inf"))
        score = tl.where(ok, (x - best_left) / t + noise_of(i, k0, k1, index), -float("inf"))
        here = tl.max(score, 0)
        first = tl.min(tl.where((score == here) & ok, i, _LAST_ID), 0)
        chosen = tl.where(here > best, first, chosen)
        best = tl.maximum(best, here)
    return chosen


@triton.jit
def _mass_above(source, n, bound, top, BLOCK: tl.constexpr):
    """Σ e^(x - top) of the tokens of a row whose logit is larger than `bound`."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(source + i, i < n, other=-float("inf"))
        mass += tl.where(x > bound, tl.exp(x - top), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _best_above(source, n, words, bound, top, BLOCK: tl.constexpr):
    """The draw from the tokens of a row whose logit is larger than `bound`."""
    k0, k1 = tl.load(words + 8).to(tl.uint32, bitcast=True), tl.load(words + 9).to(tl.uint32, bitcast=True)
    index, t = tl.load(words + 10).to(tl.uint32, bitcast=True), tl.maximum(_number(words, 0), 1e-30)
    best, chosen = tl.full([], -float("inf"), tl.float32), tl.full([], 2**31 - 1, tl.int32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(source + i, i < n, other=-float("inf"))
        score = tl.where(x > bound, (x - top) / t + noise_of_run(start, k0, k1, index, BLOCK), -float("inf"))
        here = tl.max(score, 0)
        first = tl.min(tl.where((score == here) & (x > bound), i, _LAST_ID), 0)
        chosen = tl.where(here > best, first, chosen)
        best = tl.maximum(best, here)
    return chosen


@triton.jit
def _choose(
    logits, stride, n_vocab, rows, peaks, masses, scores, chunk_ids, n_chunks, values, ids, counts, n_parts, out,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    words = rows + row * _ROW
    mode = tl.load(words + 11)
    c = tl.arange(0, CHUNKS)
    peak = tl.load(peaks + row * n_chunks + c, c < n_chunks, other=-float("inf"))
    top = tl.max(peak, 0)
    source = logits + row.to(tl.int64) * stride
    mass = tl.load(masses + row * n_chunks + c, c < n_chunks, other=0.0)
    total = tl.sum(tl.where(peak > -float("inf"), mass * tl.exp(peak - top), 0.0), 0)
    chosen = tl.full([], 0, tl.int32)
    if top == float("inf"):
        chosen = tl.full([], _NOT_FINITE, tl.int32)
    elif top == -float("inf"):
        chosen = tl.full([], _NONE_LEFT, tl.int32)
    elif mode <= _BY_DRAWS:
        t = tl.where(mode == _GREEDY, 1.0, tl.maximum(_number(words, 0), 1e-30))
        own = tl.load(scores + row * n_chunks + c, c < n_chunks, other=0.0)
        score = tl.where(peak > -float("inf"), (peak - top) / t + own, -float("inf"))
        token = tl.load(chunk_ids + row * n_chunks + c, c < n_chunks, other=_LAST_ID)
        chosen = tl.min(tl.where(score == tl.max(score, 0), token, _LAST_ID), 0)
        if mode == _BY_DRAWS:
            target = tl.maximum(_number(words, 1), 1e-37) * total
            bound = tl.load(source + chosen)
            while _mass_above(source, n_vocab, bound, top, LARGE) >= target:
                chosen = _best_above(source, n_vocab, words, bound, top, LARGE)
                bound = tl.load(source + chosen)
    else:
        is_short = mode < _WHOLE_ROW
        p, mine = tl.arange(0, PARTS), row * n_parts
        n_found = tl.sum(tl.load(counts + mine + p, (p < n_parts) & is_short, other=0), 0)
        if is_short & (n_found <= CAPACITY):
            first = mine.to(tl.int64) * CAPACITY
            x, token = _joined(values + first, ids + first, counts + mine, n_parts, PARTS, CAPACITY)
            chosen = _drawn(x, token, words, top, tl.where(mode == _BY_MIN_P, total, 0.0))
        else:
            chosen = _survivor(source, n_vocab, words, top, BLOCK)
    tl.store(out + row, chosen)
