"""Attention of many rows over a long context by cuDNN, which is twice as fast as `kernels/prefill` and needs float16.

The context is taken in pieces of a few sizes, from its beginning, each unpacked to float16 for this call; the rest and
the rows' own keys are `prefill`'s. Where there is no rest and the rows are as many as a piece, as in all batches of a
long prompt but the last, their own keys are one more piece, with cuDNN's causal mask. Results are joined by their sums
(`kernels/pieces`). Few sizes, because cuDNN plans each shape anew, in 40 ms; so rows are padded to multiples of 512.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from motley.backends.cuda.kernels.pieces import join_piece, unpack_piece
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.staging import Chunk
from motley.backends.cuda.support import MIN_PIECE_CONTEXT, MIN_PIECE_ROWS, PIECE_SIZES

_log = logging.getLogger(__name__)

_ROWS = MIN_PIECE_ROWS  # of which padded rows are a multiple
_KINDS = ("f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")  # whose values are float16 in products
_works: dict[torch.device, bool] = {}  # whether cuDNN has such an attention


def supports(device: torch.device, keys: CachePlanes, values: CachePlanes, dim: int) -> bool:
    """Whether pieces of these caches can be taken; elsewhere than on Hopper it was not measured."""
    is_known = keys.kind in _KINDS and values.kind in _KINDS and keys.block_size <= PIECE_SIZES[-1]
    return is_known and dim in (64, 128) and is_on_hopper(device) and load_cudnn(device)


def is_on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def n_taken(chunk: Chunk) -> int:
    """Tokens of a sequence's context that are taken in pieces."""
    is_long = chunk.n_rows >= MIN_PIECE_ROWS and chunk.position >= MIN_PIECE_CONTEXT and chunk.first == 0
    return chunk.position // PIECE_SIZES[-1] * PIECE_SIZES[-1] if is_long else 0


def takes_own(chunk: Chunk) -> bool:
    """Whether the rows' own keys are a piece, too."""
    return n_taken(chunk) == chunk.position > 0 and chunk.n_rows in PIECE_SIZES


def pieces(n_tokens: int) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of each piece of `n_tokens`, the largest ones first."""
    start = 0
    for size in PIECE_SIZES:
        while n_tokens - start >= size:
            yield start, size
            start += size


def attend_pieces(
    q: torch.Tensor,
    keys: CachePlanes,
    values: CachePlanes,
    head_rows: slice,
    table: torch.Tensor,
    n_tokens: int,
    out: torch.Tensor,
    sums: torch.Tensor,
    *,
    scale: float,
    rotation: int = 1,
    with_own: bool = False,
) -> None:
    """Add the first `n_tokens` of a context, `table` (int32 ids of blocks), to out and sums, as `prefill` leaves them.

    q (rows, heads, dim) float32, all of a sequence. `rotation`: of stored values, to be undone. `with_own`: these
    tokens are all before the rows; then the rows' own keys are added, too, and out and sums are overwritten.
    """
    n_rows, n_heads, dim = q.shape
    n_kv_heads = head_rows.stop - head_rows.start
    n_padded = -(-n_rows // _ROWS) * _ROWS
    halves = torch.empty(
        n_padded, n_heads, dim, dtype=torch.float16, device=q.device
    )  # the rest: any numbers
    halves[:n_rows] = q
    queries = halves.transpose(0, 1)[None]
    room = [torch.empty(n_kv_heads, PIECE_SIZES[0], dim, dtype=torch.float16, device=q.device) for _ in "kv"]
    taken = [(start, size, False) for start, size in pieces(n_tokens)]
    if with_own:
        assert n_rows == n_padded, "the mask would be another"
        taken.append((n_tokens, n_rows, True))
        out.zero_()
        sums.fill_(-torch.inf)
    for start, size, is_causal in taken:
        own = [each.view(-1)[: n_kv_heads * size * dim].view(n_kv_heads, size, dim) for each in room]
        for planes, piece in zip((keys, values), own, strict=True):
            unpack_piece(planes, head_rows, table, start // planes.block_size, piece)
        result, logs = library_attention(queries, own[0][None], own[1][None], scale, is_causal)
        rows = result[0].transpose(0, 1).contiguous()
        join_piece(out, sums, rows, logs.view(n_heads, n_padded), rotation)


def library_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool = False
) -> tuple[Any, Any]:
    """cuDNN's attention, float16 (1, heads, tokens, dim), and the natural logarithms of its sums."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return found[0], found[1]


def load_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention works there. The first one loads it, which takes most of a second."""
    if device not in _works:
        try:
            with torch.inference_mode(), torch.cuda.device(device):
                x = torch.zeros(1, 1, _ROWS, 128, dtype=torch.float16, device=device)
                library_attention(x, x, x, 1.0)
                torch.cuda.synchronize(device)
            _works[device] = True
        except RuntimeError as error:
            _works[device] = False
            _log.info("%s: long prompts do without cuDNN: %s", device, error)
    return _works[device]


def rehearse(
    keys: CachePlanes, values: CachePlanes, head_rows: slice, n_heads: int, dim: int, rotation: int
) -> None:
    """Calls the kernels that pieces need, while kernels are recorded to be compiled: nothing is launched."""
    device, n_kv_heads = keys.codes.device, head_rows.stop - head_rows.start
    table = torch.zeros(1, dtype=torch.int32, device=device)
    for planes in (keys, values):
        out = torch.empty(n_kv_heads, planes.block_size, dim, dtype=torch.float16, device=device)
        unpack_piece(planes, head_rows, table, 0, out)
    row, sums = torch.empty(1, n_heads, dim, device=device), torch.empty(1, n_heads, device=device)
    join_piece(row, sums, row.half(), sums.view(n_heads, 1), rotation)
