"""`motley run`: answer one prompt, or chat."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import typer

from motley.cli.chat import CHAT_TOKENS, chat
from motley.cli.console import INTERRUPTED, reporting_errors, say
from motley.cli.conversation import Conversation
from motley.cli.figures import show_figures, show_speed
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions, resolve_text, unescape
from motley.cli.loading import load, say_later_kernels
from motley.cli.options.loading import LoadOptions
from motley.cli.options.output import Debug, DisplayPrompt, Json, Markdown
from motley.cli.options.sampling import SamplingOptions
from motley.cli.options.text import (
    ContextShift,
    ConversationFlag,
    Escape,
    File,
    IgnoreEos,
    Keep,
    Predict,
    Prompt,
    ReversePrompt,
    SingleTurn,
    SystemPrompt,
)
from motley.cli.prompt_cache import PromptCacheOptions
from motley.cli.templates import TemplateOptions, resolve_template
from motley.engine import SamplingParams
from motley.engine.request import CANCELLED
from motley.errors import ConfigError
from motley.gguf import read_spec
from motley.milestones import mark, since_start


@with_groups
def run(
    source: ModelOptions = ModelOptions(),
    prompt: Prompt = None,
    file: File = None,
    system_prompt: SystemPrompt = None,
    conversation: ConversationFlag = None,
    templates: TemplateOptions = TemplateOptions(),
    single_turn: SingleTurn = False,
    predict: Predict = None,
    escape: Escape = False,
    reverse_prompt: ReversePrompt = None,
    ignore_eos: IgnoreEos = False,
    context_shift: ContextShift = False,
    keep: Keep = 4,
    prompt_cache: PromptCacheOptions = PromptCacheOptions(),
    chosen: LoadOptions = LoadOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    display_prompt: DisplayPrompt = None,
    markdown: Markdown = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer a prompt, or chat when there is none.

    The answer streams to standard output, messages go to standard error. In a
    chat, Ctrl-C stops the answer and /help lists the commands; a chat also
    reads lines from a pipe.

    \b
    [bold]motley run[/]                                       talk to the bundled model
    [bold]motley run -p "Once upon a time" -n 100[/]          let it continue a text
    [bold]motley run model.gguf -p "Why is the sky blue?"[/]  ask your own model
    [bold]motley run model.gguf -sys "Be brief." --temp 0[/]  chat with fixed answers
    [bold]motley run model.gguf -p Once --context-shift[/]    a story without an end
    [bold]motley run model.gguf -f question.txt --json[/]     output for programs
    """
    with reporting_errors(debug, as_json=as_json):
        if escape:
            prompt, system_prompt, *stops = map(unescape, (prompt, system_prompt, *(reverse_prompt or ())))
            reverse_prompt = [stop for stop in stops if stop is not None]
        text = resolve_text(prompt, file)
        is_talk = text is None or (bool(conversation) and not single_turn)
        limit = CHAT_TOKENS if predict is None and is_talk else predict
        params = SamplingParams(
            **sampling.arguments(),
            max_tokens=None if limit == -1 else limit,
            stop=tuple(reverse_prompt or ()),
            ignore_eos=ignore_eos,
            context_shift=context_shift,
            n_keep=keep,
        )
        if as_json and text is None:
            raise ConfigError("--json needs a prompt", hint="add -p TEXT or -f FILE")
        template = templates.chosen
        conversation = True if conversation is None and template is not None else conversation
        path = source.path()
        other = None if template is None else resolve_template(read_spec(path).metadata, template)
        with load(path, chosen) as llm:
            compiled = llm.warm_up
            if other is not None:
                llm.chat_template = other
            talk = Conversation(
                llm, params, system=system_prompt, use_template=conversation, renders_markdown=markdown
            )
            prompt_cache.load(talk)
            if as_json and text is not None:
                _print_json(talk, path.name, text)
            elif text is None or is_talk:
                chat(talk, opening=text, single_turn=single_turn, shows_statistics=chosen.verbose)
            else:
                _print_once(talk, text, display_prompt, is_verbose=chosen.verbose)
            prompt_cache.save(talk, is_chat=is_talk)
            mark("answered")
            say_later_kernels(llm, compiled, is_verbose=chosen.verbose)
        if chosen.verbose:
            mark("closed")
            say(f"end: {', '.join(f'{seconds:.2f} s {name}' for name, seconds in since_start()[-2:])}")


def _print_once(
    conversation: Conversation, text: str, display_prompt: bool | None, *, is_verbose: bool
) -> None:
    """Streams one answer. A text that it continues is printed first; default: only on a terminal."""
    if not conversation.is_chat and (sys.stdout.isatty() if display_prompt is None else display_prompt):
        sys.stdout.write(text)
        sys.stdout.flush()
    answer = conversation.print_answer(text)
    if is_verbose:
        show_figures(answer, conversation.llm.memory())
    else:
        show_speed(answer)
    if answer.finish_reason == CANCELLED:
        raise typer.Exit(INTERRUPTED)


def _print_json(conversation: Conversation, model: str, text: str) -> None:
    completion = conversation.answer(text)
    result = {
        "model": model,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason,
        "timings": asdict(completion.timings),
        "load_seconds": conversation.llm.load_seconds,
        "memory": conversation.llm.memory(),
    }
    typer.echo(json.dumps(result, ensure_ascii=False))
