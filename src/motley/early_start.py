"""Work that a command begins on other threads while it imports torch: the GPU's context, reading the model's file, and,
where no kernel was ever compiled, the process that compiles them.

They take seconds at worst and need no Python of this process. Nothing depends on them: what fails here fails again,
with a message, where it is needed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from motley import compile_process
from motley.milestones import mark
from motley.page_cache import FileRange, read_ahead

_COMMANDS = ("run", "warm", "bench")
# Flags that choose other devices than the first GPU, which is what a command takes by default.
_CHOOSE_DEVICES = (
    "--device",
    "-dev",
    "--gpu-layers",
    "--n-gpu-layers",
    "-ngl",
    "--main-gpu",
    "-mg",
    "--backend",
)
_FIRST_GPU = ("auto", "cuda", "cuda:0")
_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR, _SHARED_MEMORY = 75, 76, 97  # CUdevice_attribute: compute capability, opt-in bytes of a block


def begin(arguments: Sequence[str]) -> None:
    """Start what a command line will need. `arguments`: without the program's name."""
    if not arguments or arguments[0] not in _COMMANDS or {"-h", "--help"} & set(arguments):
        return
    if uses_first_gpu(arguments) and "RANK" not in os.environ:  # torchrun gives each process a GPU
        _start(open_gpu)
    if file := model_file(arguments):
        _start(lambda: read_file_ahead(file))


def uses_first_gpu(arguments: Sequence[str]) -> bool:
    """Whether a command with these flags computes on the first GPU, if there is one."""
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, own = flag.partition("=")
        if name in _CHOOSE_DEVICES:
            is_device = name in ("--device", "-dev")
            return is_device and (own if has_value else value).split(",")[0] in _FIRST_GPU
    return True


def model_file(arguments: Sequence[str]) -> str | None:
    """The first argument that is a file with the ending of models."""
    return next((each for each in arguments[1:] if each.endswith(".gguf") and os.path.isfile(each)), None)


def open_gpu() -> None:
    """Make the first GPU's primary context, which torch will use: half a second in the driver."""
    if sys.platform != "linux":
        return
    driver = ctypes.CDLL(_DRIVER)  # its calls release Python's lock
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return
    with suppress(Exception):
        start_compiler(driver, device)
    if not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        mark("GPU's context")


def start_compiler(driver: ctypes.CDLL, device: ctypes.c_int) -> None:
    """Start the process that compiles kernels, if none were compiled before."""
    if compile_process.has_compiled() or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return
    found = [ctypes.c_int() for _ in range(3)]
    for value, attribute in zip(found, (_MAJOR, _MINOR, _SHARED_MEMORY), strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return
    major, minor, shared_memory = (value.value for value in found)
    compile_process.start_early(10 * major + minor, shared_memory)


def read_file_ahead(path: str) -> None:
    """Read a file into the page cache."""
    read_ahead([FileRange(path, 0, os.path.getsize(path))])
    mark("file read ahead")


def _start(work: Callable[[], None]) -> None:
    def run() -> None:
        with suppress(Exception):
            work()

    Thread(target=run, name="motley-early", daemon=True).start()
