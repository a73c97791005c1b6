"""A file that is damaged, or made to do harm: damage shows in the logits, and no row overruns a kernel's memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ReferenceBackend, run_graph

from gguf import GGMLQuantizationType, GGUFWriter
from motley import LLM
from motley.backends.cpu.native import core
from motley.errors import RequestError
from motley.formats import PackedTensor, get_format
from motley.graph import F32, Graph
from motley.graph.ops import Input, MatMul, RmsNorm, Weight
from motley.kvcache.types import CACHE_TYPES

N_VOCAB = 4096  # of the bundled model
N_EMBD = 524_288  # a row of float32 is twice a thread's scratch memory


def write_wide_model(path: Path, n_embd: int) -> Path:
    """A model whose rows are absurdly wide, in a file of a few KiB: what is not written is a hole."""
    writer = GGUFWriter(path, "llama")
    sizes = {"context_length": 64, "embedding_length": n_embd, "block_count": 1, "feed_forward_length": 32}
    heads = {"attention.head_count": 1, "attention.head_count_kv": 1}
    for key, value in (sizes | heads | {"attention.key_length": 32, "attention.value_length": 32}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(ord("!") + i) for i in range(31)] + ['!"'])
    writer.add_token_merges(['! "'])
    q8_0 = GGMLQuantizationType.Q8_0
    shapes = {"token_embd": (32, n_embd), "blk.0.attn_output": (n_embd, 32), "blk.0.ffn_down": (n_embd, 32)}
    for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
        shapes[f"blk.0.{name}"] = (32, n_embd)
    n_bytes = 0
    for name, (n_rows, n_columns) in shapes.items():
        n_bytes += n_rows * n_columns // 32 * 34
        shape = (n_rows, n_columns // 32 * 34)  # of bytes
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.uint8), n_rows * shape[1], raw_dtype=q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        n_bytes += 4 * n_embd
        writer.add_tensor_info(f"{name}.weight", (n_embd,), np.dtype(np.float32), 4 * n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + n_bytes + 4096)
    return path


def test_a_small_file_with_huge_rows_is_no_danger(tmp_path: Path) -> None:
    path = write_wide_model(tmp_path / "wide.gguf", N_EMBD)
    assert path.stat().st_blocks * 512 < 64 * 1024
    with LLM(path, n_ctx=16, n_parallel=1, n_batch=4, backend="cpu") as llm:
        assert llm.logits([1, 2]).shape == (2, 32)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rows_longer_than_the_scratch_memory_are_normalized_and_multiplied(instruction_set: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, N_EMBD)
    weight = PackedTensor.pack(torch.randn(16, N_EMBD), get_format("Q8_0"))
    normed = RmsNorm(1e-5)(Input((2, N_EMBD), F32)(name="x"))
    graph = Graph.of(MatMul()(normed, Weight((16, N_EMBD), "Q8_0")(name="w")))
    backend = CpuBackend(instruction_set)
    (found,) = run_graph(backend, graph, {"x": x}, {"w": backend.load(weight)})
    (expected,) = run_graph(ReferenceBackend(), graph, {"x": x}, {"w": weight})
    assert (found - expected).norm() / expected.norm() < 1e-2


def test_a_program_refuses_what_its_scratch_memory_does_not_hold() -> None:
    program, batch, store = core.Program(core.Pool(1)), core.Batch(), (0, 0, 0, 0, 0, 1, 0)
    for dim, n_heads in ((513, 1), (0, 1), (64, 65)):
        with pytest.raises(ValueError, match=r"scratch memory|too many query heads"):
            program.attention(0, 0, 1, n_heads, 1, dim, 16, store, store, 1.0, 0, 0, batch, 0, 0, 1, 0)
    with pytest.raises(ValueError, match="scratch memory"):
        program.cache_write(0, 0, 1, 1, 1024, 16, store, store, 0, 0, batch)
    with pytest.raises(ValueError, match="multiple of 32"):
        program.norm(0, 0, 0, 64, 1, 33, 1e-5)


@pytest.fixture(scope="module")
def damaged(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a NaN in the embedding of each token: it is in all activations from the first norm on. (A
    NaN in a norm is refused before loading.)
    """
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    with LLM(bundled, n_ctx=16) as llm:
        rows = llm.spec.tensor("token_embd.weight").data.numpy()
    data, weight = bundled.read_bytes(), rows.tobytes()
    assert data.count(weight) == 1
    damaged = np.frombuffer(weight, np.uint8).reshape(N_VOCAB, -1).copy()
    damaged[:, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)  # the scale of a row's first block
    path.write_bytes(data.replace(weight, damaged.tobytes()))
    return path


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_a_nan_ends_as_nan_logits_and_a_clear_error(damaged: Path, kind: str) -> None:
    for backend in ("cpu", "cpu-exact", "reference"):
        with LLM(damaged, n_ctx=64, cache_type_k=kind, cache_type_v=kind, backend=backend) as llm:
            assert np.isnan(llm.logits([5, 6, 7])).all(), backend
            with pytest.raises(RequestError, match="logits contain nan"):
                llm.generate([5, 6, 7], max_tokens=2)
