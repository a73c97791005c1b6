"""A row has the same bits in a batch of any size: drafts and other requests change no text."""

from __future__ import annotations

import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ExactCpuBackend, run_op
from test_native_products import draw_weight

from motley.backends.cpu.native import FORMATS as NATIVE_FORMATS
from motley.backends.cpu.native import PLAIN_FORMATS
from motley.graph.ops import MatMul


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", NATIVE_FORMATS)
def test_a_product_of_a_row_is_the_same_beside_other_rows(name: str, instruction_set: str) -> None:
    # More columns than a panel has, and a number of rows and columns that fills no vector.
    weight = draw_weight(name, n_rows=37, n_blocks=551 if name in PLAIN_FORMATS else 3)
    x = torch.randn(40, weight.shape[1], generator=torch.Generator().manual_seed(1))
    for backend in (CpuBackend(instruction_set), ExactCpuBackend(instruction_set)):
        alone = torch.cat([run_op(backend, MatMul(), [x[i : i + 1], weight]) for i in range(40)])
        for n in (2, 3, 4, 7, 8, 16, 33, 40):
            assert torch.equal(run_op(backend, MatMul(), [x[:n], weight]), alone[:n]), f"{n} rows"
