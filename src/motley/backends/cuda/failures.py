"""Errors of torch, Triton and the driver as the one that users know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from motley.errors import DeviceError, MotleyError


@contextmanager
def as_device_errors(device: torch.device) -> Iterator[None]:
    """Turns failures inside into a DeviceError. If memory is exhausted, torch's cached memory is released."""
    try:
        yield
    except MotleyError:
        raise
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DeviceError(
            f"{device} has run out of memory: {_first_line(error)}",
            hint="lower the batch size (n_batch), the context (-c) or the cache's limit, or free memory on the GPU",
        ) from error
    except Exception as error:
        raise DeviceError(f"{device} has failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), repr(error))
