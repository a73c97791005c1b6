"""Masks over a vocabulary: which tokens may follow, when the end may, and lazy grammars."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from motley.errors import RequestError
from motley.gguf import read_spec
from motley.grammar import GrammarCompiler, Matcher, read_constraint
from motley.grammar.compiler import _Pieces
from motley.grammar.matcher import allowed_ids
from motley.text import Tokenizer

JSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def tokenizer(bundled: Path) -> Tokenizer:
    return Tokenizer.from_spec(read_spec(bundled))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def made(compiler: GrammarCompiler, **options: object) -> Matcher:
    constraint = read_constraint(**options)  # type: ignore[arg-type]
    assert constraint is not None
    return compiler.matcher(constraint)


def feed(matcher: Matcher, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special=False, parse_special=False):
        mask = matcher.mask()
        assert mask is None or token in allowed_ids(mask, tokenizer.n_vocab), tokenizer.token_bytes(token)
        matcher.accept(token)


def ids(matcher: Matcher, tokenizer: Tokenizer) -> set[int]:
    mask = matcher.mask()
    return (
        set(range(tokenizer.n_vocab)) if mask is None else set(allowed_ids(mask, tokenizer.n_vocab).tolist())
    )


def test_the_end_is_allowed_exactly_when_the_grammar_is_fulfilled(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = made(compiler, regex="ab+")
    assert not tokenizer.eog_ids & ids(matcher, tokenizer)
    feed(matcher, tokenizer, "a")
    assert not tokenizer.eog_ids & ids(matcher, tokenizer)
    feed(matcher, tokenizer, "b")
    assert tokenizer.eog_ids <= ids(matcher, tokenizer)
    assert not matcher.is_complete  # another b may follow


def test_a_grammar_that_cannot_go_on_is_complete(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = made(compiler, json_schema=JSON)
    feed(matcher, tokenizer, '{"n": 12')
    assert not matcher.is_complete
    feed(matcher, tokenizer, "}")
    assert matcher.is_complete


def test_json_object_forces_an_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    pieces = {tokenizer.token_bytes(i).lstrip()[:1] for i in ids(made(compiler, json_object=True), tokenizer)}
    assert pieces <= {b"{", b""}


def test_control_tokens_are_never_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = made(compiler, regex=r"(.|\n)*")
    assert ids(matcher, tokenizer) & tokenizer.control_ids == tokenizer.eog_ids


def test_a_token_that_the_mask_forbids_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = made(compiler, regex="[0-9]+")
    with pytest.raises(RequestError, match="grammar"):
        feed_unchecked(matcher, tokenizer, "x")


def feed_unchecked(matcher: Matcher, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special=False):
        matcher.accept(token)


def test_matchers_of_one_grammar_do_not_share_their_state(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    first, second = made(compiler, regex="ab"), made(compiler, regex="ab")
    before = ids(second, tokenizer)
    feed(first, tokenizer, "ab")
    assert first.is_complete
    assert ids(second, tokenizer) == before


def test_characters_may_be_torn_over_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = made(compiler, json_schema={"type": "string"})
    feed(matcher, tokenizer, '"')
    tokens = tokenizer.encode("𝄞", add_special=False)
    assert len(tokens) > 1
    for token in tokens[:-1]:
        matcher.accept(token)
        assert tokenizer.token_id('"') not in ids(matcher, tokenizer)  # not in the middle of a character
    matcher.accept(tokens[-1])
    feed(matcher, tokenizer, '"')
    assert matcher.is_complete


def test_a_special_token_of_a_lark_grammar_may_be_one_with_a_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    text_token, control = tokenizer.token_id("<tool_call>"), tokenizer.token_id("<|im_start|>")
    assert text_token is not None
    assert control is not None
    assert text_token in ids(made(compiler, grammar='start: <tool_call> "x"'), tokenizer)
    assert ids(made(compiler, grammar='start: <|im_start|> "x"'), tokenizer) == {control}
    with pytest.raises(RequestError, match="unknown special token"):
        made(compiler, grammar='start: <|nothing|> "x"')


LAZY = 'start: "<tool_call>\\n" /[0-9]+/ "</tool_call>"'


def test_a_lazy_grammar_is_free_until_its_trigger(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = made(compiler, grammar=LAZY, grammar_triggers=("<tool_call>",))
    feed(matcher, tokenizer, "Anything <tool_cal < at all. ")
    assert tokenizer.eog_ids <= ids(matcher, tokenizer)
    matcher.accept(tokenizer.token_id("<tool_call>") or 0)
    assert all(tokenizer.token_bytes(i).startswith(b"\n") for i in ids(matcher, tokenizer))
    feed(matcher, tokenizer, "\n12")
    assert not tokenizer.eog_ids & ids(matcher, tokenizer)
    feed_unchecked(matcher, tokenizer, "</tool_call>")
    assert matcher.is_complete


def test_a_token_that_completes_a_trigger_and_breaks_the_grammar_is_forbidden(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = 'start: "call:" /[0-9]+/ ";"'
    matcher = made(compiler, grammar=grammar, grammar_triggers=("call:",))
    feed(matcher, tokenizer, "now call")
    wrong = [i for i in range(tokenizer.n_vocab) if is_wrong_after_call(tokenizer.token_bytes(i))]
    assert wrong
    assert not set(wrong) & ids(matcher, tokenizer)
    assert tokenizer.encode(":", add_special=False)[0] in ids(matcher, tokenizer)
    assert len(ids(matcher, tokenizer)) == tokenizer.n_vocab - len(wrong)
    feed(matcher, tokenizer, " me, call:7")
    assert tokenizer.encode(";", add_special=False)[0] in ids(matcher, tokenizer)


def is_wrong_after_call(piece: bytes) -> bool:
    if piece.startswith(b":"):
        return not piece[1:].isdigit() and piece != b":"
    return b"call:" in piece


def test_a_trigger_may_be_a_control_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    control = tokenizer.token_id("<|im_start|>") or 0
    for grammar in ('start: <|im_start|> "x"', 'start: "<|im_start|>" "x"'):
        matcher = made(compiler, grammar=grammar, grammar_triggers=("<|im_start|>",))
        feed(matcher, tokenizer, "free")
        matcher.accept(control)
        feed(matcher, tokenizer, "x")
        assert matcher.is_complete


def test_the_grammar_must_begin_with_the_trigger(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="does not begin with the trigger 'zzz'"):
        made(compiler, grammar=LAZY, grammar_triggers=("zzz",))


def test_two_triggers_and_the_first_to_come_counts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = 'start: "A:" /[0-9]/ | "BB:" /[a-z]/'
    for text in ("so A:5", "so BB:q"):
        matcher = made(compiler, grammar=grammar, grammar_triggers=("A:", "BB:"))
        feed(matcher, tokenizer, text)
        assert matcher.is_complete


def test_a_vocabulary_without_an_end_token_has_one_outside(tokenizer: Tokenizer) -> None:
    class Endless(Tokenizer):
        eog_ids = frozenset()  # type: ignore[assignment]

    endless = Endless(tokenizer._vocab)
    assert _Pieces(endless, [b"a", b"b"]).eos_token_id == 2
    matcher = made(GrammarCompiler(endless), regex="ab?")
    feed(matcher, endless, "a")
    mask = matcher.mask()
    assert mask is not None
    assert np.count_nonzero(allowed_ids(mask, endless.n_vocab)) == 1  # only b
    feed(matcher, endless, "b")
    assert matcher.is_complete


def test_a_sentencepiece_vocabulary_puts_no_space_before_forced_text() -> None:
    special = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    tokens = [*special, ("▁", 1), ("a", 1), ("▁a", 1), ("b", 1)]
    fields = {
        "model": "llama",
        "tokens": [text for text, _ in tokens],
        "token_type": [kind for _, kind in tokens],
        "scores": [-float(i) for i in range(len(tokens))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    tokenizer = Tokenizer.from_metadata({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    matcher = made(GrammarCompiler(tokenizer), grammar='root ::= "aab"')
    text = b""
    while not matcher.is_complete:
        token = min(ids(matcher, tokenizer) - tokenizer.eog_ids)
        matcher.accept(token)
        text += tokenizer.token_bytes(token)
    assert text == b"aab"


def test_grammars_compile_where_large_stacks_are_not_allowed(tokenizer: Tokenizer) -> None:
    sizes: list[int] = []

    def refuse(size: int = 0) -> int:
        sizes.append(size)
        if size > 2**20:
            raise ValueError("no such stack")
        return 0

    with patch("threading.stack_size", refuse):
        assert ids(made(GrammarCompiler(tokenizer), regex="ab"), tokenizer)
    assert max(sizes) > 2**20
