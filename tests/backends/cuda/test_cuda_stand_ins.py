"""Stand-ins for weights have the planes of the real ones, and no contents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.planes import WeightPlanes, join_rows, to_planes
from motley.backends.cuda.stand_ins import StandIns
from motley.backends.cuda.weights import BorrowedMatrix, DeviceMatrix
from motley.errors import DeviceError
from motley.formats import PackedTensor, get_format
from motley.graph import Tensor
from motley.graph.ops import Weight

CPU = torch.device("cpu")
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4", "F16", "BF16", "F32")


def node(form: str, *shape: int) -> Tensor:
    return Weight(shape, form)(name="a weight")


def layout(planes: WeightPlanes) -> list[object]:
    """All that a kernel's variant may depend on."""
    parts = (planes.codes, planes.scale, planes.high)
    each = [None if p is None else (p.shape, p.stride(), p.dtype, p.data_ptr() % 16) for p in parts]
    return [planes.kind, planes.n_columns, *each]


def stand_in(stand_ins: StandIns, form: str, *shape: int) -> WeightPlanes:
    made = stand_ins.weight(node(form, *shape))
    assert isinstance(made, DeviceMatrix)
    return made.ref.planes


@pytest.mark.parametrize("form", FORMATS)
def test_planes_are_those_of_a_loaded_matrix(form: str) -> None:
    known = get_format(form)
    for n_rows, n_columns in ((8, 256), (1040, 256), (3, 512)):
        packed = PackedTensor(torch.zeros(n_rows, known.row_bytes(n_columns), dtype=torch.uint8), known)
        assert layout(stand_in(StandIns(CPU), form, n_rows, n_columns)) == layout(to_planes(packed))


def test_experts_are_the_rows_of_one_matrix_and_vectors_stay_packed() -> None:
    assert stand_in(StandIns(CPU), "Q4_K", 4, 16, 256).n_rows == 64
    vector = StandIns(CPU).weight(node("F32", 24))
    assert isinstance(vector, PackedTensor)
    assert vector.shape == (24,)
    assert vector.unpack().tolist() == [0.0] * 24


def test_joined_matrices_are_like_those_of_contents() -> None:
    known, stand_ins = get_format("Q6_K"), StandIns(CPU)
    row_bytes = known.row_bytes(256)
    parts = [to_planes(PackedTensor(torch.zeros(n, row_bytes, dtype=torch.uint8), known)) for n in (8, 24)]
    twins = [stand_in(stand_ins, "Q6_K", n, 256) for n in (8, 24)]
    assert layout(stand_ins.join(twins)) == layout(join_rows(parts))
    with pytest.raises(AssertionError, match="unlike"):
        stand_ins.join([twins[0], stand_in(stand_ins, "Q4_K", 8, 256)])


def test_all_share_the_memory_of_the_largest_plane_and_keep_to_the_limit() -> None:
    stand_ins = StandIns(CPU, 64 * 256)
    large, small = (stand_in(stand_ins, "Q8_0", n, 256) for n in (64, 8))
    assert large.codes.data_ptr() == small.codes.data_ptr()
    with pytest.raises(DeviceError, match="stand-ins"):
        stand_in(stand_ins, "Q8_0", 65, 256)


def test_a_backends_stand_in_has_a_state_of_its_own() -> None:
    backend = CudaBackend("cpu")
    backend.copies.is_kept = True
    twin = backend.stand_in(None)
    assert twin.kernel_variant == backend.kernel_variant
    twin.copies.is_kept = False
    assert backend.copies.is_kept
    assert isinstance(twin.weight_like(node("Q8_0", 8, 256)), DeviceMatrix)
    with pytest.raises(AssertionError, match="only a stand-in"):
        backend.weight_like(node("Q8_0", 8, 256))


def lines_of(script: str, folder: Path) -> list[str]:
    """What a script beside this file prints, in a process without Triton's interpreter. It must succeed."""
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / script, folder],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-2000:]}"
    return run.stdout.splitlines()


@pytest.mark.slow
def test_models_have_the_same_kernels_by_stand_ins_of_their_first_layers(tmp_path: Path) -> None:
    lines = lines_of("record_stand_ins.py", tmp_path)
    assert lines[-1] == "bundled:1 mixed:2 plain:1 hybrid:2 gemma3:0"


@pytest.mark.slow
def test_crews_have_the_same_kernels_by_stand_ins(tmp_path: Path) -> None:
    """And its batches, with borrowed weights and without, need no others."""
    lines = lines_of("record_crews.py", tmp_path)
    messages = "_advance,_post,_fetch"
    assert lines[1:] == [
        f"layer: True 0 {messages},_repack_q4_k",
        f"cpu_first: True 0 {messages},_repack_q4_k",
        f"tensor: True 0 {messages}",
        f"experts: True 2 {messages},_repack_q4_k",
        f"some_experts: True 2 {messages},_repack_q4_k",
        f"shared_experts: True 2 {messages}",
        "virtual_tensor: True 0 ",
        "virtual_layer: True 0 ",
        f"expert_layers: True 0 {messages},_repack_q4_k",
    ]


def test_planes_of_borrowed_weights_share_the_memory_of_all_stand_ins() -> None:
    twin = CudaBackend("cpu").stand_in(None)
    resident = twin.weight_like(node("Q8_0", 64, 256))
    borrowed = twin.borrowed_like(node("Q4_K", 8, 256))
    assert isinstance(resident, DeviceMatrix)
    assert isinstance(borrowed, BorrowedMatrix)
    assert borrowed.source.shape == (8, 256)
    assert borrowed.source.data.untyped_storage().nbytes() == 144  # one row
    assert twin._stand_ins is not None
    planes = twin._stand_ins.borrowed_planes(borrowed.source, 8)
    assert (planes.kind, planes.n_rows, planes.n_columns) == ("Q4_K", 8, 256)
    assert planes.codes.data_ptr() == resident.ref.planes.codes.data_ptr()
    with pytest.raises(AssertionError, match="only a stand-in"):
        CudaBackend("cpu").borrowed_like(node("Q4_K", 8, 256))
