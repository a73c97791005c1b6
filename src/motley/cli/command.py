"""The class of all commands: flags by their whole names, errors in two lines, help without boxes."""

from __future__ import annotations

import re
import signal
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from motley.cli.arguments import read_words
from motley.cli.help import is_switch, render_help
from motley.errors import ConfigError, MotleyError

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, wherever this version of typer has it
_TYPED = "motley.typed"  # in a context's `meta`: what was typed for each flag


class Command(TyperCommand):
    """A command of `motley`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        flags = {
            name: not is_switch(param) for param in options for name in (*param.opts, *param.secondary_opts)
        }
        if ctx.resilient_parsing:  # for completion: the line is not finished
            return list(super().parse_args(ctx, args))
        line = read_words(args, flags, ctx.command_path)
        ctx.meta[_TYPED] = line.values
        if line.notice is not None:
            from motley.cli.report import say

            say(f"note: {line.notice}")
        try:
            return list(super().parse_args(ctx, line.words))
        except _UsageError as error:
            error.ctx = error.ctx or ctx  # some come without it
            raise

    def invoke(self, ctx: Any) -> Any:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # all is imported: see `motley.cli.main`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(render_help(self, ctx))


class Group(TyperGroup):
    """The group of all commands. Usage errors are printed in two lines, as all errors."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(render_help(self, ctx))

    def main(self, args: Any = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        try:
            result = super().main(words, standalone_mode=False, **extra)
        except (_UsageError, MotleyError) as error:
            if not standalone_mode:
                raise
            result = _report(error, words)
        except typer.Abort:
            if not standalone_mode:
                raise
            result = 1
        if not standalone_mode:
            return result
        sys.exit(result if isinstance(result, int) else 0)


def _report(error: Any, words: list[str]) -> int:
    from motley.cli.report import USER_ERROR, report

    if type(error).__name__ == "NoArgsIsHelpError":  # `motley` alone
        sys.stdout.write(f"{error.format_message()}\n")
        return USER_ERROR
    report(error if isinstance(error, MotleyError) else plain_error(error), as_json="--json" in words)
    return USER_ERROR


def plain_error(error: Any) -> ConfigError:
    """A usage error of the parser, in Motley's words."""
    ctx = error.ctx
    command = ctx.command_path if ctx is not None else "motley"
    hint = f"{command} --help lists the {'flags' if ' ' in command else 'commands'}"
    param = getattr(error, "param", None)
    if param is None or param.param_type_name != "option":
        if extra := re.search(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", error.format_message()):
            return ConfigError(f"unexpected argument: {extra[1]}", hint=f"quote a text with spaces; {hint}")
        if (
            flag := getattr(error, "option_name", None)
        ) and "no such option" in error.format_message().lower():
            return ConfigError(f"unknown flag {flag}", hint=hint)
        message, _, guess = error.format_message().rstrip(".").partition(" Did you mean ")
        hint = f"did you mean {guess} {hint}" if guess else hint
        return ConfigError(message[:1].lower() + message[1:].rstrip("."), hint=hint)
    typed = ctx.meta.get(_TYPED, {}) if ctx is not None else {}
    flag = next((name for name in param.opts if name in typed), param.opts[0])
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    value = typed.get(flag, "")
    return ConfigError(f"{flag} {value!r} {_reason(error.message, value, low, high)}", hint=hint)


def _reason(message: str, value: str, low: float | None, high: float | None) -> str:
    is_whole = "int" in message
    kind = "a whole number" if is_whole else "a number"
    limits = " and ".join(
        f"{word} {limit}" for word, limit in (("at least", low), ("at most", high)) if limit is not None
    )
    try:
        int(value) if is_whole else float(value)
        is_number = True
    except ValueError:
        is_number = False
    if not is_number and ("number" in message or "integer" in message or "range" in message):
        return f"is not {kind}"
    if limits:
        return f"must be {limits}"
    return f"is not possible: {message[:1].lower()}{message[1:].rstrip('.')}"
