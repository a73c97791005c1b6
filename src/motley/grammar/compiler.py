"""Compiles constraints for one vocabulary, and keeps the latest ones."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from motley.errors import RequestError
from motley.grammar.constraint import Constraint, llguidance_package, shortened
from motley.grammar.lark import with_texts_of
from motley.grammar.lazy import LazyMatcher, Triggers
from motley.grammar.matcher import EagerMatcher, Matcher, allowed_ids
from motley.text import Tokenizer

T = TypeVar("T")

_STACK = 256 * 2**20  # bytes of virtual memory: llguidance recurses along rules
_PATIENCE = 20.0  # seconds for a compilation
_MAX_KEPT = 64  # compiled grammars
_LIMITS = {  # of llguidance: a mask takes milliseconds at most
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}


def check_constraint(constraint: Constraint) -> None:
    """Raises RequestError if the grammar is malformed. Needs no vocabulary, so it does not know special tokens."""
    llguidance = llguidance_package()
    message = _with_large_stack(
        lambda: llguidance.LLMatcher.validate_grammar(
            constraint.source, limits=llguidance.LLParserLimits(**_LIMITS)
        )
    )
    if message and not message.startswith("WARNING") and "unknown special token" not in message:
        raise _refused(message)


class GrammarCompiler:
    """Makes matchers for a tokenizer's vocabulary. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = (
            None  # llguidance's tokenizer: nearly a second for 150,000 tokens, so made when needed
        )
        self._kept: OrderedDict[Constraint, Callable[[], Matcher]] = OrderedDict()

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of an answer. RequestError for a grammar that cannot be used."""
        with self._lock:
            make = self._kept.get(constraint)
        if make is None:
            make = _with_large_stack(lambda: self._compile(constraint))
        with self._lock:
            self._kept[constraint] = make
            self._kept.move_to_end(constraint)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return make()

    def _compile(self, constraint: Constraint) -> Callable[[], Matcher]:
        llguidance = llguidance_package()
        vocabulary = self._make_vocabulary()
        base = llguidance.LLMatcher(
            vocabulary,
            self._known(constraint.source),
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS),
        )
        if base.is_error():
            raise _refused(base.get_error())
        self._try(base)
        if not constraint.triggers:
            return lambda: EagerMatcher(base.deep_copy())
        triggers = Triggers(constraint.triggers, base, self._pieces, self._tokenizer.control_ids)
        return lambda: LazyMatcher(triggers)

    def _known(self, source: str) -> str:
        """The grammar, where "<tool_call>" as a special token means its text if the vocabulary has it as text."""

        def is_text(name: str) -> bool:
            token = self._tokenizer.token_id(name)
            return token is not None and token not in self._tokenizer.control_ids

        if not source.lstrip().startswith("{"):
            return with_texts_of(source, is_text)
        whole = json.loads(source)
        for each in whole.get("grammars", ()):
            if isinstance(lark := each.get("lark_grammar"), str):
                each["lark_grammar"] = with_texts_of(lark, is_text)
        return json.dumps(whole)

    def _try(self, base: Any) -> None:
        """Takes the first steps, so that a grammar that explodes there is refused before its request runs."""
        trial = base.deep_copy()
        for _ in range(2):
            mask = trial.compute_bitmask()
            if trial.is_error():
                raise _refused(trial.get_error())
            ids = np.setdiff1d(allowed_ids(mask, self._tokenizer.n_vocab), list(self._tokenizer.eog_ids))
            if not len(ids) or trial.is_stopped():
                break
            if not trial.consume_token(int(ids[len(ids) // 2])):
                raise _refused(trial.get_error())

    def _make_vocabulary(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._pieces)
            return self._vocabulary

    @cached_property
    def _pieces(self) -> Sequence[bytes]:
        return [self._tokenizer.token_bytes(token) for token in range(self._tokenizer.n_vocab)]


class _Pieces:
    """A vocabulary as llguidance reads it: raw bytes of each token; control tokens match no text."""

    def __init__(self, tokenizer: Tokenizer, pieces: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        ends = sorted(tokenizer.eog_ids)
        # Without an end token, an id beyond the vocabulary means the end, and is never chosen.
        self.tokens = [*pieces] if ends else [*pieces, b"<end>"]
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id in ends else ends[0] if ends else len(pieces)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted({*tokenizer.control_ids, *ends, self.eos_token_id})

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens with exactly these bytes: llguidance refuses others."""
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode(data.decode(errors="replace"), add_special=False, parse_special=False)
        return ids if b"".join(self.tokens[i] for i in ids) == data else self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """Always the longest token that fits: SentencePiece's encoder puts a space before a text."""
        ids, at = [], 0
        while at < len(data):
            n = next((n for n in range(self._n_longest, 0, -1) if data[at : at + n] in self._ids), 0)
            if not n:
                break
            ids.append(self._ids[data[at : at + n]])
            at += n
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}

    @cached_property
    def _n_longest(self) -> int:
        return max(map(len, self._ids), default=0)


def _vocabulary(tokenizer: Tokenizer, pieces: Sequence[bytes]) -> Any:
    if not pieces:
        raise RequestError("the model has no vocabulary, so an answer cannot be constrained")
    llguidance = llguidance_package()
    wrapped = _Pieces(tokenizer, pieces)
    ends = sorted(tokenizer.eog_ids) or [wrapped.eos_token_id]
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapped), eos_token=ends)


_stack_lock = threading.Lock()


def _with_large_stack(work: Callable[[], T]) -> T:
    """The result of `work()`, run on a thread with a large stack, within `_PATIENCE` seconds."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = _started(run)
    thread.join(_PATIENCE)
    if errors:
        raise errors[0]
    if not results:
        raise RequestError(f"the grammar was not compiled within {_PATIENCE:.0f} seconds", hint="simplify it")
    return results[0]


def _started(run: Callable[[], None]) -> threading.Thread:
    """A thread with a large stack, or with the usual one where the system does not allow it."""
    with _stack_lock:  # the stack size is a setting of the process
        before = threading.stack_size()
        try:
            threading.stack_size(_STACK)
            thread = _thread(run)
            thread.start()
        except (ValueError, RuntimeError, MemoryError):
            threading.stack_size(before)
            thread = _thread(run)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _thread(run: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=run, name="motley-grammar", daemon=True)


def _refused(message: str) -> RequestError:
    return RequestError(f"the grammar, schema or regex cannot be used: {shortened(message)}")
