"""How a command loads a model: with a progress bar, and with notices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from motley.cli.console import loading_bar, say
from motley.cli.options.loading import LoadOptions
from motley.milestones import since_start
from motley.units import show_bytes

if TYPE_CHECKING:
    from motley.llm import LLM
    from motley.runtime.warm_up import WarmUp


def load(path: Path, chosen: LoadOptions) -> LLM:
    """Loads the model. Unless -np says otherwise it has memory for one sequence, as a command runs one."""
    from motley.llm import LLM  # here, as `motley serve` reads these flags in a process without torch

    arguments = chosen.placed(path).arguments()
    arguments["n_parallel"] = chosen.parallel or 1
    with loading_bar(f"Loading {path.name}") as (progress, compiling):
        llm = LLM(path, progress=progress, compiling=compiling, **arguments)
    llm.allow_idle_tasks()
    say_choices(llm)
    if chosen.verbose:
        for detail in llm.details:
            say(detail)
    devices = llm.device_memory()
    total = sum(memory["weights"] for memory in devices.values())
    say(f"loaded {show_bytes(total)} in {llm.load_seconds:.2f} s")
    if llm.warm_up.kernels or llm.warm_up.failures:
        say_kernels(llm.warm_up, is_verbose=chosen.verbose)
    if chosen.verbose:
        say("start: " + ", ".join(f"{seconds:.2f} s {name}" for name, seconds in since_start()))
    if len(devices) > 1:
        shares = (
            f"{name} {m['weights'] / total:.1%} ({show_bytes(m['weights'])})" for name, m in devices.items()
        )
        say(f"weights: {', '.join(shares)}")
    return llm


def say_choices(llm: LLM) -> None:
    """Prints the devices, if they were left to Motley, and the notices."""
    if llm.chosen_devices is not None:
        say(llm.chosen_devices)
    for notice in llm.notices:
        say(f"note: {notice}")


def say_kernels(warm_up: WarmUp, *, is_verbose: bool) -> None:
    """Prints how many kernels were compiled and which failed; with `is_verbose` all of them, the slowest first."""
    say(str(warm_up))
    for line in warm_up.details if is_verbose else ():
        say(line)
    for notice in warm_up.notices:
        say(f"note: {notice}")


def say_later_kernels(llm: LLM, before: WarmUp, *, is_verbose: bool) -> None:
    """Prints the kernels again if others were compiled since `before`; without `is_verbose` only if more failed."""
    now = llm.warm_up
    if (is_verbose and now != before) or now.failures != before.failures:
        say_kernels(now, is_verbose=is_verbose)
