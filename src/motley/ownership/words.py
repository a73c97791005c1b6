"""Ownership words: which device owns index i of a split axis, kept compressed.

A word is a string of devices as long as the axis. It is stored as a product of powers, and the base of
a power is a device or again a word: `(0³ 1²)⁴ 2⁵`. No operation expands a word, so the
cost of an operation depends on the number of terms (`n_terms`), not on the length of the axis.

Normal form. Every constructor keeps two invariants:

1. Runs are maximal. Neighbouring terms never have the same letter at their border, nor do the end and the
   start of a repeated base. So the runs of the terms are *the* runs of the string: `stretch` multiplies their
   lengths, and `factor_outer(B)` exists exactly if B divides all of them.
2. Repetition is folded, greedily from the left: `u u` is `u²`, `u uᵏ` and `uᵏ u` are `uᵏ⁺¹`, `x (y x)ᵏ` is
   `(x y)ᵏ x`. That keeps words small and gives equal strings the same terms in all but contrived cases.

Equality does not depend on 2. The fingerprint (a polynomial of the letters modulo a prime, which concatenation
and powers compute in closed form) and the length are functions of the string, so `hash` agrees with `==`
however a string was built, and different strings are distinguished at once. Equal fingerprints with
different terms are compared by `_same_letters`, an exact walk over both products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import NamedTuple

_PRIME = 2**61 - 1
_POINT = 0x1B873593CC9E2D51 % _PRIME  # where the polynomial is evaluated; any large residue is suitable

# The longest period, in terms, that folding looks for. It bounds the work on a word of many irregular runs;
# `power` and `concat` of whole words keep longer periods by construction.
_MAX_PERIOD = 64

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Term(NamedTuple):
    """`base` repeated `times` ≥ 1 times. A word as a base has two runs or more, and repeats twice or more."""

    base: int | Word
    times: int


@dataclass(frozen=True, eq=False, repr=False)
class Word:
    """An immutable string over the devices 0, 1, …; made by `run`, `of` and `concat`. `Word(())` is empty."""

    terms: tuple[Term, ...]  # in normal form, which the constructors below guarantee

    @staticmethod
    def run(counts: Iterable[int]) -> Word:
        """0 written counts[0] times, then 1 written counts[1] times, …; a device may own nothing."""
        return Word.concat(Word.of(device, n) for device, n in enumerate(counts))

    @staticmethod
    def of(device: int, n: int) -> Word:
        """One device's letter, n times."""
        if device < 0 or n < 0:
            raise ValueError(f"a run of {n} indices on device {device}: neither may be negative")
        return Word((Term(device, n),)) if n else Word(())

    @staticmethod
    def concat(parts: Iterable[Word]) -> Word:
        """The parts one after another; equal neighbours become a power."""
        powers = (word.power(sum(1 for _ in same)) for word, same in groupby(parts))
        return Word(_normal(term for power in powers for term in power.terms))

    def __add__(self, other: Word) -> Word:
        return Word.concat((self, other))

    def power(self, k: int) -> Word:
        """The word k times in a row: the split of the inner axis after the reshape (k, n) → (k·n)."""
        if k < 0:
            raise ValueError(f"a word cannot be repeated {k} times")
        if k == 0 or not self.terms:
            return Word(())
        if k == 1:
            return self
        if len(self.terms) == 1:
            base, times = self.terms[0]
            return Word((Term(base, times * k),))
        head, tail = _edge_run(self.terms, 0), _edge_run(self.terms, -1)
        if head.base != tail.base:
            return Word((Term(self, k),))
        # a…a: a run crosses each seam, so rotate the base until none does.
        core = self.slice(head.times, len(self) - tail.times)
        body = Word(_normal((*core.terms, Term(head.base, head.times + tail.times))))
        return Word(_normal((head, *body.power(k - 1).terms, *core.terms, tail)))

    def __pow__(self, k: int) -> Word:
        return self.power(k)

    def stretch(self, k: int) -> Word:
        """Each letter k times: the split of the outer axis after the reshape (n, k) → (n·k)."""
        if k < 0:
            raise ValueError(f"letters cannot be written {k} times")
        return self._with_runs(lambda n: n * k) if k else Word(())

    def slice(self, a: int, b: int) -> Word:
        """The letters [a, b)."""
        self._check_range(a, b)
        return Word(_normal(_cut(self.terms, a, b)))

    def factor_outer(self, k: int) -> Word | None:
        """The u with `u.stretch(k) == self`, if there is one."""
        if k < 1:
            raise ValueError(f"cannot undo a stretch by {k}")
        # Runs are maximal, so each of them is a stretched run.
        return None if any(n % k for n in self._run_lengths()) else self._with_runs(lambda n: n // k)

    def factor_inner(self, k: int) -> Word | None:
        """The u with `u.power(k) == self`, if there is one."""
        if k < 1:
            raise ValueError(f"cannot undo a power of {k}")
        length, rest = divmod(len(self), k)
        if rest:
            return None
        root = self.slice(0, length)
        return root if root.power(k) == self else None

    def count(self, device: int) -> int:
        """How many indices the device owns."""
        return sum(
            times * (int(base == device) if isinstance(base, int) else base.count(device))
            for base, times in self.terms
        )

    def counts(self, n_devices: int) -> tuple[int, ...]:
        """How many indices each of the devices owns."""
        counts = tuple(self.count(device) for device in range(n_devices))
        if sum(counts) != len(self):
            raise ValueError(f"{self} has letters beyond device {n_devices - 1}")
        return counts

    def local_range(self, device: int, a: int, b: int) -> tuple[int, int]:
        """The range of local indices of the device's part of the indices [a, b)."""
        self._check_range(a, b)
        return self._rank(device, a), self._rank(device, b)

    def letter(self, i: int) -> int:
        """The owner of index i."""
        self._check_range(i, i + 1)
        for base, times in self.terms:
            size = _size(base)
            if i < size * times:
                return base if isinstance(base, int) else base.letter(i % size)
            i -= size * times
        raise AssertionError("an index within the word lies in one of its terms")

    def runs(self) -> Iterator[tuple[int, int]]:
        """(device, length) of every maximal run of the expanded string."""
        for base, times in self.terms:
            if isinstance(base, int):
                yield base, times
            else:
                for _ in range(times):
                    yield from base.runs()

    def global_ranges(self, device: int) -> Iterator[tuple[int, int]]:
        """The maximal ranges [start, stop) that the device owns, in order: the ranges of a weight that it loads."""
        start = 0
        for owner, n in self.runs():
            if owner == device:
                yield start, start + n
            start += n

    @property
    def sole_owner(self) -> int | None:
        """The device that owns every index; None if there are several, or no index at all."""
        if len(self.terms) == 1 and isinstance(self.terms[0].base, int):
            return self.terms[0].base
        return None

    @property
    def is_single(self) -> bool:
        """Whether one device owns every index."""
        return self.sole_owner is not None

    @cached_property
    def n_terms(self) -> int:
        """The compressed size: all terms, nested ones included."""
        return sum(1 if isinstance(base, int) else 1 + base.n_terms for base, _ in self.terms)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Word):
            return NotImplemented
        if self is other:
            return True
        if self._length != other._length or self._fingerprint != other._fingerprint:
            return False
        return self.terms == other.terms or _same_letters(self, other)

    def __hash__(self) -> int:
        return hash((self._length, self._fingerprint))

    def __str__(self) -> str:
        def show(term: Term) -> str:
            base = str(term.base) if isinstance(term.base, int) else f"({term.base})"
            return base if term.times == 1 else base + str(term.times).translate(_SUPERSCRIPTS)

        return " ".join(map(show, self.terms)) or "ε"

    def __repr__(self) -> str:
        return f"<Word {self}>"

    @cached_property
    def _length(self) -> int:
        return sum(_size(base) * times for base, times in self.terms)

    @cached_property
    def _fingerprint(self) -> int:
        """Σ (letter + 1) · pointⁿ⁻¹⁻ⁱ modulo the prime, by Horner's rule; powers are geometric series."""
        value = 0
        for base, times in self.terms:
            one = base + 1 if isinstance(base, int) else base._fingerprint
            ratio = pow(_POINT, _size(base), _PRIME)
            shift = pow(ratio, times, _PRIME)
            series = times if ratio == 1 else (shift - 1) * pow(ratio - 1, -1, _PRIME)
            value = (value * shift + one * series) % _PRIME
        return value

    def _check_range(self, a: int, b: int) -> None:
        if not 0 <= a <= b <= len(self):
            raise IndexError(f"[{a}, {b}) is not a range within a word of {len(self)} letters")

    def _rank(self, device: int, i: int) -> int:
        """How many of the first i indices the device owns."""
        owned = 0
        for base, times in self.terms:
            if i <= 0:
                break
            size = _size(base)
            full, rest = divmod(min(i, size * times), size)
            if not isinstance(base, int):
                owned += full * base.count(device) + base._rank(device, rest)
            elif base == device:
                owned += full
            i -= size * times
        return owned

    def _run_lengths(self) -> Iterator[int]:
        """The length of each run in the terms; a repeated base counts once."""
        for base, times in self.terms:
            if isinstance(base, int):
                yield times
            else:
                yield from base._run_lengths()

    def _with_runs(self, scale: Callable[[int], int]) -> Word:
        """The same product with every run length scaled; an injective scale keeps the normal form."""
        return Word(
            tuple(
                Term(base, scale(times)) if isinstance(base, int) else Term(base._with_runs(scale), times)
                for base, times in self.terms
            )
        )


def _size(base: int | Word) -> int:
    return 1 if isinstance(base, int) else len(base)


def _edge_run(terms: tuple[Term, ...] | list[Term], end: int) -> Term:
    """The first (end = 0) or last (end = -1) run of the terms' string."""
    term = terms[end]
    while not isinstance(term.base, int):
        term = term.base.terms[end]
    return term


def _cut(terms: tuple[Term, ...], a: int, b: int) -> Iterator[Term]:
    """The letters [a, b) of the terms: whole repetitions stay powers, at most two per level are expanded."""
    start = 0
    for base, times in terms:
        size = _size(base)
        low, high = max(a - start, 0), min(b - start, size * times)
        start += size * times
        if low >= high:
            continue
        if isinstance(base, int):
            yield Term(base, high - low)
            continue
        (first, skip), (last, keep) = divmod(low, size), divmod(high, size)
        if first == last:
            yield from _cut(base.terms, skip, keep)
            continue
        if skip:
            yield from _cut(base.terms, skip, size)
            first += 1
        yield from base.power(last - first).terms
        yield from _cut(base.terms, 0, keep)


def _normal(terms: Iterable[Term]) -> tuple[Term, ...]:
    """The normal form of a product whose bases are in normal form themselves."""
    stack: list[Term] = []
    for term in terms:
        _push(stack, term)
    return tuple(stack)


def _push(stack: list[Term], term: Term) -> None:
    """Append a term to a product in normal form."""
    base, times = term
    if stack and _edge_run(stack, -1).base == _edge_run([term], 0).base:
        if not isinstance(base, int):  # its first run grows, so the first repetition becomes separate terms
            for each in (*base.terms, *base.power(times - 1).terms):
                _push(stack, each)
            return
        while not isinstance(last := stack[-1].base, int):  # likewise the last repetition
            stack[-1:] = (*last.power(stack[-1].times - 1).terms, *last.terms)
        term = Term(base, stack.pop().times + times)
    stack.append(term)
    while _fold(stack):
        pass


def _fold(stack: list[Term]) -> bool:
    """Fold once at the end of the stack. False if nothing can be folded."""
    base, times = stack[-1]
    if isinstance(base, Word) and len(stack) > 1:
        if stack[-2].base == base:
            stack[-2:] = [Term(base, stack[-2].times + times)]
            return True
        shared = 0  # number of terms at the base's end that also precede the power
        while shared < min(len(base.terms), len(stack) - 1) and stack[-2 - shared] == base.terms[-1 - shared]:
            shared += 1
        if shared == len(base.terms):
            stack[-1 - shared :] = [Term(base, times + 1)]
            return True
        if shared:  # x (y x)ᵏ → (x y)ᵏ x
            y, x = base.terms[:-shared], base.terms[-shared:]
            del stack[-1 - shared :]
            for each in (*Word(_normal(x + y)).power(times).terms, *x):
                _push(stack, each)
            return False
    for period in range(2, min(_MAX_PERIOD, len(stack) - 1) + 1):
        before = stack[-1 - period]
        if isinstance(before.base, Word) and before.base.terms == tuple(stack[-period:]):
            stack[-1 - period :] = [Term(before.base, before.times + 1)]
            return True
        if before == stack[-1] and stack[-2 * period : -period] == stack[-period:]:
            stack[-2 * period :] = [Term(Word(tuple(stack[-period:])), 2)]
            return True
    return False


def _same_letters(left: Word, right: Word) -> bool:
    """Whether two words of equal length spell the same string, exactly, whatever their terms.

    Reads both from the left, a term at a time. Where powers pʲ and qᵏ overlap in at least |p| + |q|
    letters, Fine and Wilf's theorem says that they agree if and only if p and q are powers of one
    word of gcd(|p|, |q|) letters; over fewer letters, expanding one copy of the longer base makes progress.
    """
    xs, ys = list(reversed(left.terms)), list(reversed(right.terms))  # terms not read yet, the next term last
    while xs and ys:
        (p, j), (q, k) = xs.pop(), ys.pop()
        if _size(p) == _size(q):
            if p != q:
                return False
            common = min(j, k) * _size(p)
        else:
            common = min(j * _size(p), k * _size(q))
            if common < _size(p) + _size(q):
                common = 0
            elif not _have_common_root(p, q):
                return False
        _unread(xs, p, j, common, is_opened=not common and _size(p) > _size(q))
        _unread(ys, q, k, common, is_opened=not common and _size(q) > _size(p))
    return not xs and not ys


def _unread(rest: list[Term], base: int | Word, times: int, read: int, *, is_opened: bool) -> None:
    """Push the rest of a power after its first `read` letters; with `is_opened`, the first copy is expanded."""
    done, part = divmod(read, _size(base))
    opened = is_opened or part > 0
    if times - done - opened > 0:
        rest.append(Term(base, times - done - opened))
    if opened and isinstance(base, Word):
        rest.extend(reversed(list(_cut(base.terms, part, len(base)))))


def _have_common_root(p: int | Word, q: int | Word) -> bool:
    if isinstance(p, int) or isinstance(q, int):
        return False  # a word as a base has two letters or more
    length = gcd(len(p), len(q))
    root = p.slice(0, length)
    return root.power(len(p) // length) == p and root.power(len(q) // length) == q
