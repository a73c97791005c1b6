"""Jinja for untrusted templates: they come with the model file and run on the user's machine.

Three protections. A template can use only the filters, functions and methods that are listed here; nothing else of
Python is reachable. Every value that it makes passes a meter: the code that Jinja generates calls `Meter.admit` around
each expression that builds a value, and counts a step in each round of a loop. And an operation whose result can be far
larger than its inputs is charged before it runs (`costly`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial, wraps
from typing import Any, NoReturn, cast

from jinja2 import filters as jinja_filters
from jinja2 import nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from motley.errors import TemplateError
from motley.text.costly import Costly
from motley.text.marked import MarkedText, join, own
from motley.text.meter import Meter

# Filters of Jinja whose cost is that of reading their input once (or of sorting it).
PLAIN_FILTERS = (
    *("abs", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length", "list"),
    "reverse",
)
# Filters that do something for each item: a step for each. With the place of the attribute that they look up, if any.
ITEM_FILTERS = {
    "map": None,
    "max": 1,
    "min": 1,
    "reject": None,
    "rejectattr": 0,
    "select": None,
    "selectattr": 0,
    "unique": 1,
}
# Tests that compare a value with another one: select("in", values) does so for each item.
COMPARISONS = (
    *("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan"),
    *("<=", "le"),
)
TEXT_FILTERS = ("capitalize", "e", "escape", "lower", "safe", "upper")

METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            *(
                "capitalize",
                "casefold",
                "count",
                "endswith",
                "find",
                "index",
                "isalnum",
                "isalpha",
                "isascii",
            ),
            *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "lower"),
            *("partition", "removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper"),
        }
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset(
        {
            *("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"),
            *("cycle", "changed", "previtem", "nextitem"),
        }
    ),
}
COSTLY_METHODS = ("join", "lstrip", "replace", "rsplit", "rstrip", "split", "splitlines", "strip")


Visit = Callable[..., None]


def _metered(visit: Visit) -> Visit:
    """The code of a visited node, inside a call of `Meter.admit`."""

    def visit_metered(self: MeteredCode, node: nodes.Node, frame: Frame, **options: Any) -> None:
        self.write("environment.meter.admit(")
        visit(self, node, frame, **options)
        self.write(")")

    return visit_metered


class MeteredCode(CodeGenerator):
    """Generates Python in which the meter sees every value that is made and every round of a loop."""

    # ruff: noqa: N802, N815 (the names are those of the visitor)
    visit_List = _metered(CodeGenerator.visit_List)
    visit_Dict = _metered(CodeGenerator.visit_Dict)
    visit_Compare = _metered(CodeGenerator.visit_Compare)
    visit_Filter = _metered(CodeGenerator.visit_Filter)
    visit_Test = _metered(CodeGenerator.visit_Test)
    visit_Call = _metered(CodeGenerator.visit_Call)
    _visit_new_tuple = _metered(CodeGenerator.visit_Tuple)
    _visit_slice = _metered(CodeGenerator.visit_Getitem)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        is_target = node.ctx == "store"  # "a, b" in "for a, b in pairs" makes nothing
        (super().visit_Tuple if is_target else self._visit_new_tuple)(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)  # other items exist already
        (self._visit_slice if is_slice else super().visit_Getitem)(node, frame)

    @_metered
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.costly.join('', (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        tick = nodes.EnvironmentAttribute("meter.tick()")
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def _output_child_to_const(self, *_: object) -> NoReturn:
        raise nodes.Impossible  # nothing is computed while compiling, and all output goes through `finalize`

    def _refuse(self, node: nodes.Node, frame: Frame) -> None:
        self.fail("a chat template stands alone: no blocks, includes, imports or escaping", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block = _refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here its content is just output."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering; it holds the meter, so it is not shared.

    Text that stands in the template is marked as its own (`marked`), and the marks go with it into the output.
    """

    code_generator_class = MeteredCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, meter: Meter, now: Callable[[], datetime] = datetime.now) -> None:
        self.meter = meter
        self.costly = Costly(meter)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # would evaluate constant expressions while compiling, unmetered
            finalize=self._output,
            cache_size=0,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self.filters = _filters(self.costly)
        self.tests |= {
            name: self.costly.test(cast("Callable[..., Any]", TESTS[name])) for name in COMPARISONS
        }
        self.globals = {
            "range": safe_range,
            "dict": self.costly.mapping,
            "namespace": lambda *args, **kwargs: Namespace(self.costly.mapping(*args, **kwargs)),
            "raise_exception": self._raise_exception,
            "strftime_now": lambda pattern: self.costly.strftime(now(), pattern),
        }
        self.binop_table |= {
            "*": self.costly.multiply,
            "**": self.costly.power,
            "%": self.costly.remainder,
        }

    own = staticmethod(own)

    @staticmethod
    def concat(pieces: Iterable[str]) -> MarkedText:
        """How Jinja makes one text of what a template, a macro or a block puts out."""
        return join("", pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self.meter.admit(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Methods that are listed, then items; nothing else is ever looked at."""
        self.meter.tick()
        if isinstance(obj, str) and attribute == "format":
            return lambda *args, **kwargs: self.costly.format(self, obj, args, kwargs)
        if isinstance(obj, str) and attribute in COSTLY_METHODS:
            return partial(getattr(self.costly, attribute), obj)
        if any(isinstance(obj, kind) and attribute in names for kind, names in METHODS.items()):
            return getattr(obj, attribute)
        if isinstance(obj, Namespace) and not attribute.startswith("_"):
            return getattr(obj, attribute, self.undefined(obj=obj, name=attribute))
        try:
            return obj[attribute]
        except (TypeError, LookupError):
            if attribute.startswith("_"):
                raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}") from None
            if not isinstance(obj, Namespace) and hasattr(type(obj), attribute):
                return self.unsafe_undefined(obj, attribute)
            return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.tick()
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str):
                return self.getattr(obj, argument)
            return self.undefined(obj=obj, name=argument)

    def _output(self, value: object) -> str:
        return self.meter.admit(self.costly.text(value))

    def _raise_exception(self, message: object) -> NoReturn:
        raise TemplateError(f"the chat template refuses: {self.costly.text(message):.1000}")


def _filters(costly: Costly) -> dict[str, Callable[..., Any]]:
    def of_text(apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, *args, **kwargs: apply(costly.text(value), *args, **kwargs)

    @pass_environment
    def join_values(
        environment: Sandbox, values: Iterable[Any], d: object = "", attribute: Any = None
    ) -> str:
        if attribute is not None:
            values = map(costly.getter(environment, attribute), values)
        return costly.join(costly.text(d), values)

    def of_items(apply: Callable[..., Any], place: int | None) -> Callable[..., Any]:
        @wraps(apply)  # which keeps the mark that Jinja passes its context by
        def apply_metered(context: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            if place is not None and place < len(args):
                costly.attribute(args[place])
            costly.attribute(kwargs.get("attribute"))
            # Jinja handles empty and missing values itself.
            return apply(context, costly.each(values) if values else values, *args, **kwargs)

        return apply_metered

    @pass_environment
    def sort(environment: Sandbox, values: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return costly.sort(environment, values, *args, **kwargs)

    def replace(value: object, old: object, new: object, count: int | None = None) -> str:
        text, before, after = map(costly.text, (value, old, new))
        return costly.replace(text, before, after, -1 if count is None else count)

    return {
        **{name: jinja_filters.FILTERS[name] for name in PLAIN_FILTERS},
        **{name: of_items(jinja_filters.FILTERS[name], place) for name, place in ITEM_FILTERS.items()},
        **{name: of_text(jinja_filters.FILTERS[name]) for name in TEXT_FILTERS},
        "format": of_text(lambda text, *args, **kwargs: costly.remainder(text, kwargs or args)),
        "indent": of_text(costly.indent),
        "join": join_values,
        "replace": replace,
        "sort": sort,
        "string": costly.text,
        "title": of_text(costly.title),
        "tojson": costly.tojson,
        "trim": of_text(costly.strip),
    }
