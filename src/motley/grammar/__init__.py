"""Constrained decoding: which tokens may come next, so that an answer matches a schema, a grammar or a regex.

limits        sizes that a schema, grammar or regex may have
constraint    from a request's options to a checked `Constraint`
compiler      `GrammarCompiler`: constraints → matchers, for one vocabulary
matcher       `Matcher`: one answer's state: the mask of its next token

llguidance does the parsing. It is an optional package (`pip install motley-llm[grammar]`), imported at the first use.
This package imports no torch: a server's front process checks requests with it.
"""

from __future__ import annotations

from motley.grammar.compiler import GrammarCompiler, check_constraint
from motley.grammar.constraint import Constraint, read_constraint
from motley.grammar.matcher import Matcher, Words

__all__ = [
    "Constraint",
    "GrammarCompiler",
    "Matcher",
    "Words",
    "check_constraint",
    "read_constraint",
]
