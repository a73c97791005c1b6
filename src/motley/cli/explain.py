"""`motley explain`: how a model would be split over a crew, and the reason for each collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from motley.backends import backend_for
from motley.cli.console import reporting_errors, stdout
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions, check_writable, write_file
from motley.cli.options.cache import CacheTypeK, CacheTypeV, KvRotation
from motley.cli.options.devices import DeviceOptions
from motley.cli.options.output import Debug, Json
from motley.cli.picture import draw
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import read_params
from motley.runtime import CacheConfig, ModelSplit, default_context, split_model
from motley.runtime.crew import Crew
from motley.runtime.defaults import batch_sizes
from motley.runtime.expert_fitting import settle_experts
from motley.runtime.explain import Explanation, Section, TensorRow, explain
from motley.units import show_bytes

Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the split as a picture.")]
All = Annotated[
    bool, typer.Option("--all", help="List activations too, and every layer even if layers are alike.")
]


@with_groups
def explain_command(
    source: ModelOptions = ModelOptions(),
    chosen: DeviceOptions = DeviceOptions(),
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    kv_rotation: KvRotation = True,
    show_all: All = False,
    svg: Svg = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how a model would be split over devices, and why they would communicate.

    Layer by layer: the state of each tensor, its bytes on each device, and each collective with its reason and its
    bytes per token. No weights are loaded.

    \b
    [bold]motley explain model.gguf --device cpu,cpu -sm tensor -ts 3,1[/]
    [bold]motley explain model.gguf --device cpu,cpu,cpu -sm layer --svg split.svg[/]
    [bold]motley explain model.gguf --device "(cpu,cpu),(cpu)" -ts 3,1,2[/]
    [bold]motley explain moe.gguf --device cpu,cpu --n-cpu-moe 20[/]
    [bold]motley explain model.gguf --device cpu,cpu -sm tensor -ctk q8_0 --all[/]
    """
    with reporting_errors(debug, as_json=as_json):
        check_writable(svg)
        path = source.path()
        spec = read_spec(path)
        params = read_params(spec)
        chosen = chosen.placed(path)
        asked, _ = chosen.crew()
        cache = CacheConfig(get_cache_type(cache_type_k), get_cache_type(cache_type_v))
        n_ctx = chosen.ctx_size or default_context(params)

        def split_over(crew: Crew, n_ctx: int) -> ModelSplit:
            return split_model(spec, params, crew, cache, n_ctx=n_ctx, rotate=kv_rotation)

        n_batch, _ = batch_sizes(None, None, [device.name for device in asked.sharing])
        backends = [backend_for(device.name, "auto", device.remote_offer) for device in asked.devices]
        crew = settle_experts(
            *(asked, params, split_over, backends, cache),
            n_ctx=chosen.ctx_size or None,
            n_batch=n_batch,
            n_parallel=1,
        )
        contents = explain(split_over(crew, n_ctx))
        if svg is not None:
            write_file(svg, draw(contents))
    if as_json:
        typer.echo(json.dumps(contents, ensure_ascii=False))
        return
    console = stdout()
    _show(console, contents, show_all)


def _show(console: Console, contents: Explanation, show_all: bool) -> None:
    console.print(_devices(contents))
    shown: list[str] = []
    for section in contents["sections"]:
        picture = _fingerprint(section)
        if not show_all and picture in shown:
            console.print(Text(f"{section['name']}: like a layer above", style="dim"))
            continue
        shown.append(picture)
        console.print(_tensors(section, contents, show_all))
        for row in section["collectives"]:
            line = f"  ⇄ {row['kind']} {row['tensor']}: {row['reason']} ({row['bytes_per_token']} bytes)"
            console.print(Text(line, style="cyan"))
    counted = ", ".join(f"{n} {kind}" for kind, n in contents["collectives"].items()) or "none"
    console.print(f"\ncollectives for one token: {counted}; {show_bytes(contents['bytes_per_token'])} moved")


def _fingerprint(section: Section) -> str:
    """A key that is equal for layers with the same states and the same collectives."""
    if not section["name"].startswith("blk."):
        return section["name"]
    rows = [(t["state"], t["type"]) for t in section["tensors"]]
    return repr((rows, [c["kind"] for c in section["collectives"]]))


def _devices(contents: Explanation) -> Table:
    mode = f"Split mode {contents['split_mode']}"
    if contents["groups"]:
        mode += " between groups of devices, tensor within: " + ", ".join(
            f"({', '.join(contents['devices'][device]['device'] for device in members)})"
            for members in contents["groups"]
        )
    table = Table(title=mode, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("device", "asked", "achieved", "weights", "KV heads (all layers)"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for row in contents["devices"]:
        cells = (row["device"], f"{row['asked']:.1%}", f"{row['achieved']:.1%}", show_bytes(row["weights"]))
        table.add_row(*cells, str(row["kv_heads"]))
    said = []
    if contents["kv_repeat"] > 1:
        said.append(
            f"each KV head is stored up to {contents['kv_repeat']} times: there are more devices than heads"
        )
    if contents["experts_apart"]:
        said.append(contents["experts_apart"])
    if contents["split_experts"]:
        said.append(f"experts: {contents['split_experts']} ({contents['split_experts_reason']})")
    table.caption = "\n".join(said) or None
    return table


def _tensors(section: Section, contents: Explanation, show_all: bool) -> Table:
    table = Table(title=section["name"], title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("tensor", no_wrap=True)
    table.add_column("type")
    table.add_column("shape", justify="right")
    table.add_column("state")
    for device in contents["devices"]:
        table.add_column(device["device"], justify="right")
    for row in section["tensors"]:
        if show_all or row["kind"] != "activation":
            shape = " × ".join(map(str, row["shape"]))
            sizes = _cells(row, len(contents["devices"]))
            table.add_row(row["name"], row["type"], shape, row["state"], *sizes)
    return table


def _cells(row: TensorRow, n_devices: int) -> list[str]:
    """What each device has of a tensor: bytes of a weight, heads of a cache."""
    if row["kind"] == "cache":
        counts = [sum(n for owner, n in row["owners"] if owner == device) for device in range(n_devices)]
        whole = row["shape"][0]
        counts = counts if row["owners"] else [whole] * n_devices
        return [f"{n} head{'' if n == 1 else 's'}" if n else "–" for n in counts]
    if row["kind"] != "weight":
        return [""] * n_devices
    if row["state"] == "mapped":
        return ["in the file"] * n_devices
    missing = "not used" if row["state"] == "mirrored" else "–"
    return [show_bytes(n) if n else missing for n in row["bytes"]]
