"""`motley doctor`: what is installed, what is missing, and what to install."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import typer
from rich.text import Text

from motley import __version__
from motley.bundled import bundled_model_path
from motley.caches import cache_folder
from motley.cli.console import printable, reporting_errors, stdout
from motley.cli.options.output import Debug, Json
from motley.errors import ConfigError
from motley.units import show_bytes

OK, MISSING, PROBLEM = "ok", "missing", "problem"
_MIN_FREE = 64 << 20  # bytes: compiled kernels take tens of MiB
_STYLES = {OK: "green", MISSING: "yellow", PROBLEM: "bold red"}
# Optional packages: the module, the extra that brings it, and what it is for.
_EXTRAS = (
    ("triton", "cuda", "runs models on NVIDIA GPUs"),
    ("cuda.bindings", "cuda", "lets KV caches on a GPU grow on demand"),
    ("huggingface_hub", "hub", "downloads models: motley pull, -hf"),
    ("llguidance", "grammar", "makes answers match a JSON schema or a grammar"),
    ("uvicorn", "server", "runs motley serve"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice`: what to do; "" if nothing is needed."""

    subject: str
    state: str  # ok, missing (something optional) or problem
    found: str
    advice: str = ""


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Check this installation: what is there, what is missing, and what to install.

    The exit code is 1 if something keeps Motley from working.

    \b
    [bold]motley doctor[/]
    """
    with reporting_errors(debug, as_json=as_json):
        findings = list(check_installation())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
    else:
        _show(findings)
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(1)


def check_installation() -> Iterator[Finding]:
    yield Finding("motley", OK, f"{__version__} in {Path(__file__).parent.parent}")
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield from _torch()
    yield _native()
    yield _bundled()
    yield from _gpus()
    for module, extra, purpose in _EXTRAS:
        yield _extra(module, extra, purpose)
    yield from _folders()


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", PROBLEM, str(error), "pip install torch")
        return
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    yield Finding("torch", OK, f"{torch.__version__}, {build}")


def _native() -> Finding:
    from motley.backends.cpu.native import core

    if core is None:
        return Finding(
            "native kernels",
            PROBLEM,
            "not built: the CPU runs slow reference code",
            "install a wheel, or a C++20 compiler and build again: pip install --force-reinstall --no-deps .",
        )
    return Finding("native kernels", OK, ", ".join(core.instruction_sets()))


def _bundled() -> Finding:
    from motley.gguf import read_spec

    path = bundled_model_path()
    try:
        n_tensors = len(read_spec(path).tensors)
    except Exception as error:
        return Finding("bundled model", PROBLEM, str(error), "install Motley again")
    return Finding("bundled model", OK, f"{path.name}, {n_tensors} tensors")


def _gpus() -> Iterator[Finding]:
    from motley.runtime.inventory import inventory

    devices = inventory()
    cpu = devices[0]
    memory = "unknown" if cpu.total is None else show_bytes(cpu.total)
    yield Finding("cpu", OK, f"{cpu.name}, {cpu.cores} cores, {cpu.instructions}, {memory}")
    for gpu in devices[1:]:
        if gpu.total is None:
            yield Finding("gpu", PROBLEM, f"{gpu.device} {gpu.name}", "nvidia-smi shows what uses it")
        else:
            yield Finding("gpu", OK, f"{gpu.device}: {gpu.name}, {show_bytes(gpu.total)}")
    if len(devices) == 1:
        yield _missing_gpu()


def _missing_gpu() -> Finding:
    import torch

    has_driver = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    if not has_driver:
        return Finding("gpu", MISSING, "no NVIDIA GPU was found")
    if torch.version.cuda is None:
        advice = "pip install --force-reinstall torch (from PyPI, which has the CUDA build)"
        return Finding("gpu", PROBLEM, "there is a GPU, but this torch is for CPUs only", advice)
    return Finding(
        "gpu",
        PROBLEM,
        "there is a GPU, but torch does not see it",
        "compare the driver's version in nvidia-smi",
    )


def _extra(module: str, extra: str, purpose: str) -> Finding:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        return Finding(module, MISSING, f"not installed; it {purpose}", f"pip install 'motley-llm[{extra}]'")
    try:
        version = metadata.version(module.replace(".", "-").replace("_", "-"))
    except metadata.PackageNotFoundError:
        version = "installed"
    return Finding(module, OK, f"{version}; it {purpose}")


def _folders() -> Iterator[Finding]:
    advice = "XDG_CACHE_HOME names another one"
    try:
        caches = cache_folder().parent
    except ConfigError as error:
        yield Finding("cache folder", PROBLEM, error.message, error.hint or advice)
        return
    folder = caches
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield Finding("cache folder", PROBLEM, f"{caches} cannot be written", advice)
        return
    free = shutil.disk_usage(folder).free
    state = OK if free >= _MIN_FREE else PROBLEM
    yield Finding("cache folder", state, f"{caches}, {show_bytes(free)} free", "" if state == OK else advice)


def _show(findings: list[Finding]) -> None:
    console = stdout()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        line = Text.assemble(
            (f"{finding.state:8}", _STYLES[finding.state]),
            (f"{finding.subject:{width + 2}}", "bold"),
            printable(finding.found),
        )
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':{width + 10}}{printable(finding.advice)}", style="cyan"), soft_wrap=True)
