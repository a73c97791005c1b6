"""Speed and memory of an answer, on standard error."""

from __future__ import annotations

from collections.abc import Mapping

from motley.cli.report import say
from motley.engine import Completion
from motley.engine.request import CANCELLED
from motley.units import show_bytes


def show_speed(completion: Completion) -> None:
    """Prints the length of one answer and its speed."""
    timings = completion.timings
    stopped = ", stopped" if completion.finish_reason == CANCELLED else ""
    say(f"{timings.new_tokens} tokens, {timings.new_rate:.1f} tokens/s{stopped}")


def show_figures(completion: Completion, memory: Mapping[str, int]) -> None:
    """Prints speed and memory of one answer."""
    timings = completion.timings
    cached = f" ({timings.cached_tokens} cached)" if timings.cached_tokens else ""
    stopped = " (stopped)" if completion.finish_reason == CANCELLED else ""
    parts = ", ".join(f"{name.replace('_', ' ')} {show_bytes(n_bytes)}" for name, n_bytes in memory.items())
    say(
        f"prompt: {timings.prompt_tokens} tokens{cached}, {timings.prompt_rate:.1f} tokens/s | "
        f"answer: {timings.new_tokens} tokens{stopped}, {timings.new_rate:.1f} tokens/s | "
        f"memory: {show_bytes(sum(memory.values()))} ({parts})"
    )
