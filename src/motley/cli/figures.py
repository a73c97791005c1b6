"""Speed and memory of an answer, on standard error."""

from __future__ import annotations

from collections.abc import Mapping

from motley.cli.report import say
from motley.engine import Completion, Timings
from motley.engine.request import CANCELLED
from motley.units import show_bytes


def show_speed(completion: Completion) -> None:
    """Prints the length of one answer and its speed."""
    timings = completion.timings
    stopped = ", stopped" if completion.finish_reason == CANCELLED else ""
    say(f"{timings.new_tokens} tokens, {timings.new_rate:.1f} tokens/s{_drafted(timings)}{stopped}")


def show_figures(completion: Completion, memory: Mapping[str, int]) -> None:
    """Prints speed and memory of one answer."""
    timings = completion.timings
    cached = f" ({timings.cached_tokens} cached)" if timings.cached_tokens else ""
    stopped = " (stopped)" if completion.finish_reason == CANCELLED else ""
    parts = ", ".join(f"{name.replace('_', ' ')} {show_bytes(n_bytes)}" for name, n_bytes in memory.items())
    say(
        f"prompt: {timings.prompt_tokens} tokens{cached}, {timings.prompt_rate:.1f} tokens/s | "
        f"answer: {timings.new_tokens} tokens{stopped}, {timings.new_rate:.1f} tokens/s{_drafted(timings)} | "
        f"memory: {show_bytes(sum(memory.values()))} ({parts})"
    )


def _drafted(timings: Timings) -> str:
    """The result of speculation: tokens per step, and how many drafted tokens of each drafter were right."""
    if not timings.drafts:
        return ""
    drafts = ", ".join(f"{name} {n.accepted} of {n.drafted} right" for name, n in timings.drafts.items())
    return f", {timings.tokens_per_step:.2f} tokens a step ({drafts})"
