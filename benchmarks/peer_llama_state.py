"""Extends llama.cpp's saved sequence: gives a deep context without computing it.

With a quantized cache llama.cpp needs half an hour for a prompt of 8192 tokens. Its speed does not depend on the
cache's contents, so a short sequence is computed and saved (llama_state_seq_get_data), its cells are repeated at the
following positions, and the result is loaded again. The layout is that of llama_kv_cache::state_write in
llama-cpp-python 0.3.36, little-endian:

    u32 magic, i32 sequence, u32 streams (1), u32 cells
    per cell: i32 position, u32 sequences (1), i32 sequence
    u32 is V transposed, u32 layers
    K per layer: i32 type, u64 bytes of a cell, the cells
    V per layer: the same; or, transposed: i32 type, u32 bytes of a value, u32 values of a cell, and
                 for each of those values that of all cells
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass
class _Reader:
    data: bytes
    at: int = 0

    def take(self, n_bytes: int) -> bytes:
        self.at += n_bytes
        if self.at > len(self.data):
            raise ValueError("a saved sequence of another layout: it ends too early")
        return self.data[self.at - n_bytes : self.at]

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))


def stretch(state: bytes, n_cells: int) -> bytes:
    """The saved state of `n_cells` cells at positions 0, 1, …, whose contents are those of `state`, repeated."""
    reader = _Reader(state)
    magic, sequence, n_streams, n_saved = reader.numbers("IiII")
    if n_streams != 1 or not n_saved:
        raise ValueError(f"a saved sequence of another layout: {n_streams} streams, {n_saved} cells")
    for _ in range(n_saved):
        _, n_sequences, _ = reader.numbers("iIi")
        if n_sequences != 1:
            raise ValueError("a saved sequence of another layout: cells of several sequences")
    parts = [struct.pack("<IiII", magic, sequence, n_streams, n_cells)]
    parts += [struct.pack("<iIi", position, 1, sequence) for position in range(n_cells)]
    is_transposed, n_layers = reader.numbers("II")
    parts.append(struct.pack("<II", is_transposed, n_layers))

    def rows(n_rows: int, item_bytes: int) -> None:
        """Repeat `n_rows` rows that have one item for each cell."""
        for _ in range(n_rows):
            run = reader.take(n_saved * item_bytes)
            parts.append((run * (n_cells // n_saved + 1))[: n_cells * item_bytes])

    for number in range(2 * n_layers):  # K of all layers, then V
        if is_transposed and number >= n_layers:
            kind, value_bytes, n_values = reader.numbers("iII")
            parts.append(struct.pack("<iII", kind, value_bytes, n_values))
            rows(n_values, value_bytes)
        else:
            kind, cell_bytes = reader.numbers("iQ")
            parts.append(struct.pack("<iQ", kind, cell_bytes))
            rows(1, cell_bytes)
    if reader.at != len(state):
        raise ValueError(f"a saved sequence of another layout: {len(state) - reader.at} bytes are left over")
    return b"".join(parts)
