"""`motley tokenize`: the tokens of a text."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from motley.cli.console import printable, reporting_errors, say
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions, resolve_text
from motley.cli.options.output import Debug, Json
from motley.cli.options.text import File, Prompt
from motley.gguf import read_spec
from motley.text import Tokenizer

Ids = Annotated[bool, typer.Option("--ids", help="Print only the ids, on one line, as a list.")]
NoBos = Annotated[bool, typer.Option("--no-bos", help="Add no beginning-of-text token.")]
NoParseSpecial = Annotated[
    bool, typer.Option("--no-parse-special", help="Read <|special|> tokens in the text as plain text.")
]


@with_groups
def tokenize(
    source: ModelOptions = ModelOptions(),
    prompt: Prompt = None,
    file: File = None,
    ids: Ids = False,
    no_bos: NoBos = False,
    no_parse_special: NoParseSpecial = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the tokens of a text: one line each, id and piece.

    The text comes from -p, from -f, or from standard input. Only the
    vocabulary is read, not the weights.

    \b
    [bold]motley tokenize model.gguf -p "Hello, world"[/]
    [bold]cat book.txt | motley tokenize model.gguf --ids[/]
    """
    with reporting_errors(debug, as_json=as_json):
        path = source.path()
        text = resolve_text(prompt, file)
        tokenizer = Tokenizer.from_spec(read_spec(path))
        tokens = tokenizer.encode(
            sys.stdin.read() if text is None else text,
            add_special=not no_bos,
            parse_special=not no_parse_special,
        )
        # A token may contain part of a character; its bytes are then escaped.
        pieces = [tokenizer.token_bytes(token).decode(errors="backslashreplace") for token in tokens]
    if as_json:
        typer.echo(json.dumps({"count": len(tokens), "ids": tokens, "pieces": pieces}, ensure_ascii=False))
    elif ids:
        typer.echo(tokens)
    else:
        for token, piece in zip(tokens, pieces, strict=True):
            typer.echo(f"{token:6d} -> '{printable(piece)}'")
    if not as_json:
        say(f"{len(tokens)} tokens")
