"""`motley warm`: compile a model's GPU kernels ahead of time."""

from __future__ import annotations

from motley.cli.console import loading_bar, reporting_errors, say
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions
from motley.cli.loading import say_choices, say_kernels
from motley.cli.options.loading import LoadOptions
from motley.cli.options.output import Debug
from motley.llm import LLM


@with_groups
def warm(
    source: ModelOptions = ModelOptions(),
    chosen: LoadOptions = LoadOptions(),
    debug: Debug = False,
) -> None:
    """Compile a model's kernels for this machine's GPUs ahead of its first use.

    Triton keeps them in its cache folder. Give the cache types, the devices and the -np that you will use.

    \b
    [bold]motley warm model.gguf --device cuda:0 -ctk q8_0 -ctv q8_0[/]
    """
    with reporting_errors(debug):
        path = source.path()
        placed = chosen.placed(path)
        with loading_bar(f"Loading {path.name}") as (progress, compiling):
            for i, n_parallel in enumerate(
                dict.fromkeys((chosen.parallel, 1))
            ):  # `motley run` has one request
                arguments = placed.arguments() | {"n_parallel": n_parallel}
                with LLM(path, progress=progress, compiling=compiling, **arguments) as llm:
                    if i == 0:
                        say_choices(llm)
                    if not llm.compiles_ahead:
                        say("kernels: nothing is compiled ahead; that is done for GPUs of this process")
                        for notice in llm.warm_up.notices:
                            say(f"note: {notice}")
                        return
                    llm.finish_compiling()
                    say_kernels(llm.warm_up, is_verbose=chosen.verbose)
