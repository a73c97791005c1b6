"""The shapes that plans are made for, where the devices of a crew round them up differently."""

from __future__ import annotations

import pytest

from motley.backends import Backend, CpuBackend, DeviceOffer, ReferenceBackend, is_available
from motley.backends.cuda.planning import RemoteGpu
from motley.models import BatchShape
from motley.runtime.runner import padded

GPU = RemoteGpu("cuda:0", DeviceOffer())


@pytest.mark.skipif(not is_available(), reason="the native module is not built")
@pytest.mark.parametrize("n_outputs", [2, 3, 9, 16])
def test_a_gpu_and_a_cpu_have_few_plans(n_outputs: int) -> None:
    for crew in ([GPU, CpuBackend()], [CpuBackend(), GPU]):
        shapes = {padded(BatchShape(n, n_outputs), crew) for n in range(289, 321)}
        assert shapes == {BatchShape(320, 16)}


def test_a_device_that_does_not_pad_gets_the_batch_as_it_is() -> None:
    shape = BatchShape(256, 3)
    others: list[Backend] = [GPU, ReferenceBackend()]
    assert padded(shape, [GPU]) == BatchShape(256, 4)
    assert padded(shape, others) == shape
    assert padded(BatchShape(7, 7), others) == BatchShape(7, 7)
