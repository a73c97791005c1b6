"""Words against strings written out letter by letter."""

from __future__ import annotations

import pickle
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_oracle import letters, spell

from motley.ownership import Word
from motley.ownership.words import Term, _same_letters
from thorough import examples

MAX_LETTERS = 600
String = tuple[int, ...]
Spelled = tuple[Word, String]  # a word and the string it must be

thorough = settings(max_examples=examples(150), deadline=None)


def _run(counts: list[int]) -> Spelled:
    return Word.run(counts), tuple(device for device, n in enumerate(counts) for _ in range(n))


def _grow(smaller: st.SearchStrategy[Spelled]) -> st.SearchStrategy[Spelled]:
    def power(pair: Spelled, k: int) -> Spelled:
        return pair[0] ** k, pair[1] * k

    def stretch(pair: Spelled, k: int) -> Spelled:
        return pair[0].stretch(k), tuple(letter for letter in pair[1] for _ in range(k))

    def join(pairs: list[Spelled]) -> Spelled:
        return Word.concat(word for word, _ in pairs), sum((string for _, string in pairs), ())

    def cut(pair: Spelled, ends: tuple[float, float]) -> Spelled:
        a, b = sorted(round(end * len(pair[1])) for end in ends)
        return pair[0].slice(a, b), pair[1][a:b]

    fraction = st.floats(0, 1)
    grown = (
        st.builds(power, smaller, st.integers(0, 5))
        | st.builds(stretch, smaller, st.integers(0, 4))
        | st.builds(join, st.lists(smaller, max_size=4))
        | st.builds(cut, smaller, st.tuples(fraction, fraction))
    )
    return grown.filter(lambda pair: len(pair[1]) <= MAX_LETTERS)


crews = st.integers(1, 7)
runs = crews.flatmap(lambda n: st.lists(st.integers(0, 4), min_size=n, max_size=n)).map(_run)
spelled = st.recursive(runs, _grow, max_leaves=8)
# Over two letters and few lengths, strings repeat themselves in every way there is.
binary = st.lists(st.integers(0, 1), max_size=24).map(tuple)


@thorough
@given(spelled)
def test_word_spells_its_string(pair: Spelled) -> None:
    word, string = pair
    assert letters(word) == list(string)
    assert len(word) == len(string)
    assert [word.letter(i) for i in range(len(string))] == list(string)
    assert list(word.runs()) == [(device, len(list(run))) for device, run in groupby(string)]


@thorough
@given(spelled, spelled)
def test_equality_and_hash_are_those_of_the_strings(left: Spelled, right: Spelled) -> None:
    assert (left[0] == right[0]) == (left[1] == right[1])
    again = spell(left[1])
    assert again == left[0]
    assert hash(again) == hash(left[0])


@thorough
@given(binary, st.integers(1, 4), binary, st.data())
def test_cutting_and_joining_restores_the_word(u: String, k: int, v: String, data: st.DataObject) -> None:
    word = spell(u) ** k + spell(v)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(word)), max_size=4)))
    bounds = [0, *cuts, len(word)]
    joined = Word.concat(word.slice(a, b) for a, b in pairwise(bounds))
    assert joined == word
    assert letters(joined) == list(u * k + v)


@thorough
@given(spelled, st.integers(1, 6))
def test_factors_undo_power_and_stretch(pair: Spelled, k: int) -> None:
    word, _ = pair
    assert (word**k).factor_inner(k) == word
    assert word.stretch(k).factor_outer(k) == word


@thorough
@given(spelled, st.integers(1, 6))
def test_factors_exist_exactly_if_the_string_has_them(pair: Spelled, k: int) -> None:
    word, string = pair
    root, stretched = word.factor_inner(k), word.factor_outer(k)
    length = len(string) // k
    if len(string) % k == 0 and string[:length] * k == string:
        assert root is not None
        assert letters(root) == list(string[:length])
    else:
        assert root is None
    if len(string) % k == 0 and all(string[i] == string[i - i % k] for i in range(len(string))):
        assert stretched is not None
        assert letters(stretched) == list(string[::k])
    else:
        assert stretched is None


@thorough
@given(spelled, st.data())
def test_counts_and_ranges_are_those_of_the_string(pair: Spelled, data: st.DataObject) -> None:
    word, string = pair
    n_devices = max(string, default=0) + data.draw(st.integers(1, 2))  # some own nothing
    assert word.counts(n_devices) == tuple(string.count(device) for device in range(n_devices))
    a = data.draw(st.integers(0, len(string)))
    b = data.draw(st.integers(a, len(string)))
    for device in range(n_devices):
        owned = [i for i, letter in enumerate(string) if letter == device]
        assert word.count(device) == len(owned)
        start, stop = word.local_range(device, a, b)
        assert owned[start:stop] == [i for i in owned if a <= i < b]
        assert [i for low, high in word.global_ranges(device) for i in range(low, high)] == owned


@thorough
@given(spelled)
def test_sole_owner_is_the_only_letter(pair: Spelled) -> None:
    word, string = pair
    assert word.sole_owner == (string[0] if len(set(string)) == 1 else None)
    assert word.is_single == (len(set(string)) == 1)


@st.composite
def any_spelling(draw: st.DrawFn, string: String) -> Word:
    """A product that spells the string, in any of its forms: merged or not, folded or not."""
    terms = []
    rest = string
    while rest:
        size = draw(st.integers(1, len(rest)))
        times = 1
        while rest[size * times : size * (times + 1)] == rest[:size]:
            times += 1
        times = draw(st.integers(1, times))
        part, rest = rest[:size], rest[size * times :]
        if len(set(part)) == 1:
            terms.append(Term(part[0], size * times))
        elif times == 1:
            terms.extend(Term(letter, 1) for letter in part)
        else:
            terms.append(Term(draw(any_spelling(part)), times))
    return Word(tuple(terms))


@thorough
@given(binary.filter(bool), st.integers(1, 4), binary, st.data())
def test_exact_comparison_sees_through_every_spelling(
    u: String, k: int, v: String, data: st.DataObject
) -> None:
    string = u * k + v
    left, right = data.draw(any_spelling(string)), data.draw(any_spelling(string))
    assert _same_letters(left, right)
    assert left == right
    assert hash(left) == hash(right) == hash(spell(string))
    at = data.draw(st.integers(0, len(string) - 1))
    other = data.draw(any_spelling((*string[:at], 1 - string[at], *string[at + 1 :])))
    assert not _same_letters(left, other)
    assert left != other


@thorough
@given(spelled, spelled)
def test_exact_comparison_agrees_with_the_strings(left: Spelled, right: Spelled) -> None:
    length = min(len(left[1]), len(right[1]))
    x, y = left[0].slice(0, length), right[0].slice(0, length)
    assert _same_letters(x, y) == (left[1][:length] == right[1][:length])


def test_different_period_powers_compare_without_being_written_out() -> None:
    u = Word.run((1, 2, 1))
    long, short = Word((Term(u**6, 10**8),)), Word((Term(u**10, 6 * 10**7),))
    assert _same_letters(long, short)
    assert not _same_letters(long, Word((Term(u**9 + Word.run((1, 1, 2)), 6 * 10**7),)))


def test_words_over_a_billion_indices_stay_small() -> None:
    qkv = Word.run((3, 2, 0, 1)) + Word.run((1, 1, 0, 2))
    flat = qkv.stretch(128).power(1_000_000)
    assert len(flat) == 10 * 128 * 10**6
    assert flat.n_terms <= 8
    assert flat.factor_inner(10**6) == qkv.stretch(128)
    assert flat.factor_outer(128) == qkv**10**6
    assert flat.factor_inner(3) is None
    half = len(flat) // 2 + 77
    left, right = flat.slice(0, half), flat.slice(half, len(flat))
    assert max(left.n_terms, right.n_terms) <= 24
    assert left + right == flat
    assert (left + right).n_terms <= 8
    assert flat.counts(4) == (4 * 128 * 10**6, 3 * 128 * 10**6, 0, 3 * 128 * 10**6)
    assert flat.local_range(0, half, half) == (left.count(0),) * 2
    assert flat.letter(half) == right.letter(0)


def test_repeated_views_do_not_pile_up_terms() -> None:
    word = Word.run((5, 3, 8)) ** 1000
    for offset in range(1, 200):
        word = word.slice(offset % 7, len(word)) + word.slice(0, offset % 7)
        assert word.n_terms <= 12
    assert word.counts(3) == (5000, 3000, 8000)


def test_normal_form_starts_repetition_as_early_as_it_can() -> None:
    a, b = Word.of(0, 3), Word.of(1, 2)
    assert str(a + (b + a) ** 3 + b) == "(0³ 1²)⁴"
    assert str(a + b + a + b + a + b + a + b) == "(0³ 1²)⁴"
    assert str((a + b) ** 4 + Word.of(2, 5)) == "(0³ 1²)⁴ 2⁵"
    assert str(((a + b) ** 4 + Word.of(12, 1)).power(10)) == "((0³ 1²)⁴ 12)¹⁰"
    assert str(Word(())) == "ε"


def test_equal_totals_are_not_equal_words() -> None:
    contiguous, interleaved = Word.run((4, 4)), Word.run((2, 2)) ** 2
    assert contiguous.counts(2) == interleaved.counts(2)
    assert contiguous != interleaved
    assert contiguous.local_range(0, 0, 4) != interleaved.local_range(0, 0, 4)


def test_words_are_keys_and_survive_pickling() -> None:
    word = Word.run((3, 0, 2)) ** 7
    table = {word: "found"}
    assert table[pickle.loads(pickle.dumps(word))] == "found"
    assert word != "(0³ 2²)⁷"


def test_out_of_range_arguments_are_refused() -> None:
    word = Word.run((2, 1))
    for a, b in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(IndexError, match="not a range"):
            word.slice(a, b)
    with pytest.raises(IndexError):
        word.letter(3)
    for call in (
        lambda: Word.of(-1, 2),
        lambda: Word.of(0, -2),
        lambda: word**-1,
        lambda: word.stretch(-1),
        lambda: word.factor_inner(0),
        lambda: word.factor_outer(0),
        lambda: word.counts(1),
    ):
        with pytest.raises(ValueError, match=r"cannot|negative|beyond"):
            call()
