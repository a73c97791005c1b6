"""A device's activation memory: it never claims to be larger than it is."""

from __future__ import annotations

import pytest
import torch

from motley.backends.cpu.addresses import Scratch
from motley.engine.sampling import candidates


def n_allocated(scratch: Scratch) -> int:
    return scratch.data.untyped_storage().nbytes()


def test_it_grows_after_numpy_has_had_a_view_of_it() -> None:
    scratch = Scratch()
    scratch.require(64)
    view = scratch.data[:8].numpy()
    scratch.data.fill_(7)
    scratch.require(4096)
    assert n_allocated(scratch) >= len(scratch.data) == 4096
    assert view.tolist() == [7] * 8


def test_it_keeps_its_size_when_there_is_no_memory_for_more() -> None:
    scratch = Scratch()
    scratch.require(64)
    with pytest.raises(RuntimeError):
        scratch.require(1 << 60)
    assert n_allocated(scratch) >= len(scratch.data) == 64


def test_choosing_tokens_leaves_it_free_to_grow() -> None:
    scratch = Scratch()
    scratch.require(4 * 1024)
    logits = scratch.data.view(torch.float32).view(1, 1024)
    logits.copy_(torch.randn(1, 1024))
    assert candidates(logits, 1)[0][1].tolist() == [int(logits.argmax())]
    start = scratch.data
    scratch.require(1 << 20)
    assert scratch.data is start, "its views went along"
