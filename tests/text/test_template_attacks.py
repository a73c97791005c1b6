"""A template comes with the file, from whoever made it. None of these may run for long, take memory or get out."""

from __future__ import annotations

import pytest

from motley.errors import TemplateError
from motley.text import ChatTemplate, TemplateLimits
from motley.text.meter import Meter

LOW = TemplateLimits(steps=2_000, value_bytes=100_000, total_bytes=500_000)
COSTS = "runs for more than|makes more than|makes a value of more than"


def run(source: str) -> str:
    return ChatTemplate(source, limits=LOW).render([{"role": "user", "content": "x"}])


LOOP = "{% for i in range(99) %}"
END = "{% endfor %}"

ENDLESS = {
    "nested loops": "{% for a in range(999) %}" * 4 + END * 4,
    "a loop that filters everything out": "{% for a in range(999) %}{% for b in range(999) if false %}"
    + END * 2,
    "a loop over a filter": "{% for a in range(999)|map('string')|select %}{{ range(999)|list }}" + END,
    "a macro that calls itself twice": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "a mapping of many keys": LOOP + "{% set x = dict(['ab'] * 900) %}" + END,
    "a namespace of many keys": LOOP + "{% set x = namespace(['ab'] * 900) %}" + END,
    "comparisons": "{% set x = range(999)|list %}" + LOOP * 3 + "{{ x == x }}" + END * 3,
}

# One filter that does much for each of many items. All limits but that of steps are the usual ones.
PATH = "'0.' * 90 + '0'"
BUSY = {
    **{
        f"{name} by a path": "{{ (['a'] * 100000)|" + name + "(attribute=" + PATH + ")|list }}"
        for name in ("max", "min", "sort", "join", "map", "unique")
    },
    **{
        f"{name} by a path": "{{ (['a'] * 100000)|" + name + "(" + PATH + ")|list }}"
        for name in ("selectattr", "rejectattr")
    },
    "sort by many keys": "{{ (['a'] * 100000)|sort(attribute='0,' * 90 + '0') }}",
    "select nothing": "{{ (['a'] * 100000)|select('none')|list }}",
    "reject everything": "{{ (['a'] * 100000)|reject('string')|list }}",
    "unique of the same": "{{ (['a'] * 100000)|unique|list }}",
    "select in a long list": "{{ range(9999)|select('in', ['a'] * 100000)|list }}",
    "reject by equality": "{% set x = ['a'] * 60000 %}{{ ([x] * 2)|reject('==', x + ['b'])|list }}",
    "max of many": "{{ (['a'] * 100000)|max }}",
    "join of many": "{{ ([''] * 100000)|join }}",
    "a method of join": "{{ ''.join([''] * 100000) }}",
}

GROWING = {
    "text times a number": "{{ 'x' * 10**12 }}",
    "a number times text": "{% set x = 10**12 * 'x' %}",
    "a list times a number": "{% set x = [0] * 10**12 %}",
    "doubling text with ~": "{% set ns = namespace(x='x') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "doubling text with +": "{% set ns = namespace(x='x') %}" + LOOP + "{% set ns.x = ns.x + ns.x %}" + END,
    "doubling a list": "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = ns.x + ns.x %}" + END,
    "a list of itself, twice": "{% set ns = namespace(x=[1]) %}"
    + LOOP
    + "{% set ns.x = [ns.x, ns.x] %}"
    + END,
    "a tuple of itself, twice": "{% set ns = namespace(x=1) %}"
    + LOOP
    + "{% set ns.x = (ns.x, ns.x) %}"
    + END,
    "a mapping to itself, twice": (
        "{% set ns = namespace(x=1) %}" + LOOP + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}" + END
    ),
    "one long ~": "{% set s = 'x' * 90000 %}{{ " + "s ~ " * 99 + "s }}",
    "a long separator": "{{ range(999)|join('x' * 9999) }}",
    "a long separator, as a method": "{{ ('x' * 9999).join(['a'] * 999) }}",
    "replacing": "{{ ('x' * 9999)|replace('x', 'y' * 9999) }}",
    "replacing, as a method": "{{ ('x' * 9999).replace('', 'y' * 9999) }}",
    "many fields of %": "{{ ('%s' * 60) % (('x' * 999,) * 60) }}",
    "many fields of format": "{{ ('{0}' * 999).format('x' * 9999) }}",
    "indenting many lines": "{{ ('\\n' * 9999)|indent('x' * 99, true, true) }}",
    "splitting": "{{ ('x ' * 40000).split() }}",
    "characters of a text": "{{ ('xy' * 40000)|list }}",
    "mapping to a long text": "{{ ([0] * 999)|map('default', 'x' * 9999, true)|map('upper')|list }}",
    "slices": "{% set s = 'x' * 90000 %}" + LOOP + "{% set x = s[1:] %}" + END,
    "output": LOOP + "y" * 9999 + END,
    "output of a macro": "{% macro m() %}" + LOOP + "y" * 9999 + END + "{% endmacro %}{% set x = m() %}",
    "output of a set block": "{% set x %}" + LOOP + "y" * 9999 + END + "{% endset %}",
    "json": "{{ ([['x' * 99] * 99] * 9)|tojson(indent=99) }}",
    "text of a list": "{{ ['\\x00' * 60000] ~ '' }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_nothing_runs_for_ever(name: str) -> None:
    with pytest.raises(TemplateError, match=r"runs for more than 2000 steps|makes more than"):
        run(ENDLESS[name])


@pytest.mark.parametrize("name", BUSY)
def test_every_item_counts(name: str) -> None:
    """It is the count of steps that ends them: with a clock that stands still."""
    limits = TemplateLimits(steps=20_000, seconds=1e9)
    with pytest.raises(TemplateError, match="runs for more than 20000 steps"):
        ChatTemplate(BUSY[name], limits=limits).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ (['a'] * 100000)|max(attribute='0.' * 100000 + '0') }}",
        "{{ ['a']|sort(false, false, '0,' * 100000 + '0') }}",
        "{{ ['a']|selectattr('0.' * 100000)|list }}",
        "{{ ['a']|unique(false, '0.' * 100000)|list }}",
        "{{ ['a']|map(attribute='0.' * 100000)|list }}",
        "{{ ['a']|join('', '0.' * 100000) }}",
    ],
)
def test_a_path_to_an_attribute_is_short(source: str) -> None:
    with pytest.raises(TemplateError, match="more than 200 characters of an attribute"):
        ChatTemplate(source).render([])


def test_the_keys_of_a_sort_are_paid_for() -> None:
    """Each is a new list, and text in it is folded to a copy."""
    source = "{{ (['A' * 9] * 1000)|sort(attribute='" + "0," * 90 + "0')|length }}"
    ChatTemplate(source, limits=TemplateLimits(seconds=1e9)).render([])
    limits = TemplateLimits(total_bytes=5_000_000, seconds=1e9)
    with pytest.raises(TemplateError, match="makes more than 5000000 bytes"):
        ChatTemplate(source, limits=limits).render([])


@pytest.mark.parametrize("name", GROWING)
def test_nothing_grows_without_bound(name: str) -> None:
    with pytest.raises(TemplateError, match=COSTS):
        run(GROWING[name])


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 9 ** 9999 }}", "4096 bits in a number"),
        (
            "{% set ns = namespace(x=9) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}" + END,
            "4096 bits in a number",
        ),
        ("{{ '%1000000000d' % 1 }}", "formats in a way it may not"),
        ("{{ '%.1000000000f' % 1.5 }}", "formats in a way it may not"),
        ("{{ '%(a)1000000000d' % {'a': 1} }}", "formats in a way it may not"),
        ("{{ '%*d' % (1000000000, 1) }}", "formats in a way it may not"),
        ("{{ '%1000000000d'|format(1) }}", "formats in a way it may not"),
        ("{{ '{:1000000000}'.format(1) }}", "formats in a way it may not"),
        ("{{ '{:{}}'.format(1, 1000000000) }}", "formats in a way it may not"),
        ("{{ 'a'|indent(10**10, true) }}", "100 columns of indentation"),
        ("{{ [1]|tojson(indent=10**10) }}", "100 columns of indentation"),
        ("{{ strftime_now('%Y' * 999) }}", "100 characters of a date"),
        ("{{ 'f' * 5000 | int(base=16) }}{{ ('f' * 5000) | int(0, 16) }}", "4096 bits in a number"),
        ("{{ ('a' * 9999).strip('b' * 999 + 'a') }}", "100 characters to strip"),
        ("{{ ('a' * 9999)|trim('b' * 999 + 'a') }}", "100 characters to strip"),
        ("{{ ('a' * 9999).rsplit('ab' + 'a' * 999) }}", "100 characters to look for backwards"),
        ("{{ 'a'.rfind('b') }}", "may not have"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
        ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "calls itself too deeply"),
        (
            "{% set ns = namespace(x=1) %}{% for i in range(200) %}{% set ns.x = [ns.x] %}" + END,
            "100 containers in one another",
        ),
    ],
)
def test_absurd_requests_are_refused(source: str, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ [''] | sort(attribute='__class__') }}",
        "{{ [''] | selectattr('__class__') | list }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0[__class__]}'.format('') }}",
        "{{ ''.format_map(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.func }}{{ strftime_now.func.__globals__ }}",
        "{{ range.__globals__ }}",
        "{{ dict.__base__ }}",
        "{{ namespace.__init__ }}",
        "{{ namespace(a=1)._Namespace__attrs }}",
        "{{ self.__init__ }}",
        "{{ ''.upper.__self__ }}",
        "{{ nobody.__class__ }}",
        "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
        "{% macro f() %}{% endmacro %}{{ f._func }}",
        "{% macro f() %}{{ caller._func }}{% endmacro %}{% call f() %}{% endcall %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ ''.encode() }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ 'a'.expandtabs(10**10) }}",
        "{{ namespace(a=1) }}",
        "{{ [namespace(a=1)] }}",
        "{{ messages|map('upper') }}",
    ],
)
def test_nothing_of_python_is_within_reach(source: str) -> None:
    with pytest.raises(
        TemplateError, match=r"may not have|something that is not there|as text|as if it were data"
    ):
        run(source)


@pytest.mark.parametrize(
    "name", ["attr", "batch", "center", "pprint", "random", "slice", "urlize", "wordwrap"]
)
def test_filters_that_no_chat_needs_do_not_exist(name: str) -> None:
    with pytest.raises(TemplateError, match=f"No filter named '{name}'"):
        run("{{ 'a'|" + name + " }}")


@pytest.mark.parametrize("name", ["lipsum", "cycler", "joiner", "__builtins__", "environment"])
def test_functions_that_no_chat_needs_do_not_exist(name: str) -> None:
    with pytest.raises(TemplateError, match="is undefined"):
        run("{{ " + name + "() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{% block a %}{% endblock %}",
        "{% autoescape true %}{% endautoescape %}",
    ],
)
def test_a_template_stands_alone(source: str) -> None:
    with pytest.raises(TemplateError, match="stands alone"):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{{ " + "not " * 10_000 + "1 }}",
        "{{ a" + ".b" * 20_000 + " }}",
        "{{ 1" + "+1" * 20_000 + " }}",
        "{% if a %}" * 5_000,
        "{{ " + "9" * 50_000 + " }}",
        "{% for a in b %}" * 50 + "{% endfor %}" * 50,
        "x" * 70_000,
    ],
    ids=["parentheses", "nots", "attributes", "sums", "ifs", "digits", "loops", "size"],
)
def test_the_compiler_cannot_be_overwhelmed(source: str) -> None:
    with pytest.raises(TemplateError, match=r"cannot be compiled|characters"):
        ChatTemplate(source)


def test_constants_are_not_computed_while_compiling() -> None:
    template = ChatTemplate("{{ 'x' * 10**12 }}{{ 'a'|replace('', 'y') }}", limits=TemplateLimits(steps=0))
    with pytest.raises(TemplateError):  # it is the rendering that would compute them
        template.render([])


def test_time_is_limited_too() -> None:
    ticks = iter(range(100))
    meter = Meter(TemplateLimits(seconds=10), clock=lambda: float(next(ticks)))
    for _ in range(10):
        assert meter.tick()
    with pytest.raises(TemplateError, match="more than 10 seconds"):
        meter.tick()
