"""`motley perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
from dataclasses import replace

import typer

from motley.cli.console import reporting_errors, steps_bar
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions, resolve_text
from motley.cli.loading import load, say_later_kernels
from motley.cli.options.loading import LoadOptions
from motley.cli.options.output import Debug, Json
from motley.cli.options.text import Chunks, File, Prompt
from motley.errors import ConfigError
from motley.llm import LLM
from motley.quality import Score, read_chunks, second_half_nll

_N_CTX = 512  # as in llama.cpp, so that figures can be compared


@with_groups
def perplexity(
    source: ModelOptions = ModelOptions(),
    prompt: Prompt = None,
    file: File = None,
    chunks: Chunks = None,
    chosen: LoadOptions = LoadOptions(),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how well a model predicts a text: lower is better, 1 is perfect.

    As llama.cpp does it: the text is cut into chunks of the context size, each
    is read from an empty cache, and the tokens of its second half are scored.
    Chunks have 512 tokens unless -c says otherwise. The figure comes with one
    standard error. It compares models only with the same vocabulary, on the
    same text, at the same context size.

    \b
    [bold]motley perplexity model.gguf -f wiki.test.raw[/]
    [bold]motley perplexity model.gguf -f wiki.test.raw -c 2048 -ctk q8_0[/]
    """
    with reporting_errors(debug, as_json=as_json):
        text = resolve_text(prompt, file)
        if text is None:
            raise ConfigError("there is no text to measure", hint="add -f FILE")
        path = source.path()
        n_ctx = chosen.ctx_size or _N_CTX
        with load(path, replace(chosen, ctx_size=n_ctx)) as llm:
            compiled = llm.warm_up
            score, n_chunks = measure(llm, text, n_ctx, chunks)
            say_later_kernels(llm, compiled, is_verbose=chosen.verbose)
    if as_json:
        result = {
            "model": path.name,
            "perplexity": score.perplexity,
            "error": score.error,
            "n_ctx": n_ctx,
            "chunks": n_chunks,
            "scored_tokens": score.count,
        }
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"PPL = {score.perplexity:.4f} ± {score.error:.4f}")
        typer.echo(f"{path.name}: {n_chunks} chunks of {n_ctx} tokens, {score.count} tokens scored")


def measure(llm: LLM, text: str, n_ctx: int, limit: int | None = None) -> tuple[Score, int]:
    """The score of `text`, and the number of chunks that were scored."""
    chunks = read_chunks(llm.tokenizer, text, n_ctx, limit)
    score = Score()
    with steps_bar("Reading", len(chunks)) as advance:
        for chunk in chunks:
            score += second_half_nll(llm.logits(chunk), chunk)
            advance(f"PPL {score.perplexity:.4f}")
    return score, len(chunks)
