"""`motley kv`: the layout and size of a model's KV cache, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from motley.backends import backend_for
from motley.cli.console import reporting_errors
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions
from motley.cli.options.loading import LoadOptions
from motley.cli.options.output import Debug, Json
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import read_params
from motley.runtime import (
    CacheConfig,
    CacheFigures,
    Crew,
    DeviceFigures,
    ModelSplit,
    cache_figures,
    split_model,
)
from motley.runtime.defaults import choose_context
from motley.runtime.expert_fitting import settle_experts
from motley.units import parse_bytes, show_bytes

_N_BATCH = 512  # tokens per step: layers with a window need room for them


@with_groups
def kv(
    source: ModelOptions = ModelOptions(),
    chosen: LoadOptions = LoadOptions(),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the KV cache of a model before it is loaded: blocks, bytes on each device, and what each type costs.

    Types are compared by the bytes of one context, and by the longest context in the same number of bytes.

    \b
    [bold]motley kv model.gguf -c 32768[/]                            at the default, f16
    [bold]motley kv model.gguf -c 32768 -ctk q8_0 -ctv q4_0[/]        with quantized types
    [bold]motley kv model.gguf --device cpu,cpu --device-memory 8GiB,4GiB[/]
    """
    with reporting_errors(debug, as_json=as_json):
        figures, devices = _plan(source.path(), chosen)
    if as_json:
        contents = asdict(figures) | {"devices": [asdict(device) for device in devices]}
        typer.echo(json.dumps(contents, ensure_ascii=False))
    else:
        _show(Console(highlight=False), figures, devices)


def _plan(path: Path, chosen: LoadOptions) -> tuple[CacheFigures, list[DeviceFigures]]:
    spec = read_spec(path)
    chosen = chosen.placed(path)
    params = read_params(spec)
    limit = chosen.kv_cache_bytes
    config = CacheConfig(
        get_cache_type(chosen.cache_type_k),
        get_cache_type(chosen.cache_type_v),
        block_size=chosen.kv_block_size,
        max_tokens=chosen.kv_cache_tokens,
        max_bytes=None if limit is None else parse_bytes(limit),
        demand_paged=chosen.kv_cache_demand_paged,
        state_type=chosen.state_type,
    )
    asked, _ = chosen.crew(chosen.backend)
    backends = [backend_for(device.name, chosen.backend, device.remote_offer) for device in asked.devices]
    sizes = {"n_batch": chosen.n_batch or _N_BATCH, "n_parallel": chosen.parallel or 1}
    n_ctx = chosen.ctx_size or None

    def split_over(crew: Crew, n_ctx: int) -> ModelSplit:
        return split_model(spec, params, crew, config, n_ctx=n_ctx, rotate=chosen.kv_rotation)

    crew = settle_experts(asked, params, split_over, backends, config, n_ctx=n_ctx, **sizes)
    context = choose_context(n_ctx, lambda n: split_over(crew, n), params, backends, config, **sizes)
    split, fit = context.split, context.fit
    reserved = [fit.plan.n_bytes(device) for device in range(len(crew))]
    is_paged = chosen.kv_cache_demand_paged  # then nothing is resident before the first token
    devices = [DeviceFigures(crew.label(i), n, 0 if is_paged else n) for i, n in enumerate(reserved)]
    return cache_figures(split, fit), devices


def _show(console: Console, figures: CacheFigures, devices: list[DeviceFigures]) -> None:
    console.print(
        f"K {figures.cache_type_k}{_rotated(figures.k_rotation)}, "
        f"V {figures.cache_type_v}{_rotated(figures.v_rotation)}, blocks of {figures.block_size} tokens"
    )
    console.print(
        f"a token takes {_exact(figures.bytes_per_token)} bytes by the table of types, "
        f"{_exact(figures.bytes_per_token_allocated)} as allocated"
    )
    console.print(f"a context of {figures.n_ctx} tokens takes {show_bytes(figures.context_bytes)}")
    groups = _table("layers", "blocks", "tokens")
    for group in figures.groups:
        groups.add_row(
            group.name, str(group.n_layers), str(group.n_blocks), str(group.n_blocks * figures.block_size)
        )
    console.print(groups)
    if (state := figures.state) is not None:
        console.print(
            f"{state.n_layers} layers have a recurrent state of {show_bytes(state.slot_bytes)} ({state.state_type}) "
            f"for each sequence and checkpoint: {state.n_slots} slots, {state.n_rings} rings of "
            f"{show_bytes(state.ring_bytes)} for pending tokens"
        )
    places = _table("reserved", "resident at the start")
    for device in devices:
        places.add_row(device.device, show_bytes(device.reserved), show_bytes(device.resident))
    console.print(places)
    types = _table(
        "bytes a token", f"context of {figures.n_ctx}", f"longest context in {show_bytes(figures.budget)}"
    )
    for row in figures.types:
        longest = "any" if row.longest_context is None else str(row.longest_context)
        types.add_row(row.name, _exact(row.bytes_per_token), show_bytes(row.context_bytes), longest)
    console.print(types)


def _table(*columns: str) -> Table:
    """A table with a column of names without a title, then columns of figures."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _rotated(rotation: int) -> str:
    return f" (rotated by {rotation})" if rotation else ""


def _exact(n: float) -> str:
    return f"{n:g}" if n < 1e6 else f"{n:.0f}"
