"""Loading: each device takes its part straight from the mapped file, and nobody holds more than parts."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from motley.backends import get_backend
from motley.bench import write_random_model
from motley.errors import SplitError
from motley.formats import FORMATS, PackedTensor
from motley.gguf import read_spec
from motley.models import BatchShape, GraphOptions, read_params
from motley.ownership import MIRRORED, Split, Word
from motley.runtime import ModelSplit, make_crew
from motley.runtime.group import ThreadGroup
from motley.runtime.loading import load_weights, part_of, weight_bytes

PROBE = Path(__file__).with_name("loading_probe.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred megabytes, a third of which is the output matrix."""
    path = tmp_path_factory.mktemp("loading") / "model.gguf"
    write_random_model(path, "llama-15m", "F32")
    return path


def probe(model: Path, limit: int, *how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROBE), str(model), str(limit), *how]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def all_weights(model: Path) -> int:
    """Bytes of all weights but the embeddings, which are looked up in the map."""
    tensors = read_spec(model).tensors
    return sum(info.nbytes for name, info in tensors.items() if name != "token_embd.weight")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are the kernel's")
@pytest.mark.slow
def test_loading_never_holds_a_tensor_beside_its_parts(model: Path) -> None:
    total = all_weights(model)
    loaded = probe(model, int(1.2 * total))
    assert loaded.returncode == 0, loaded.stderr
    assert total <= int(loaded.stdout) <= 1.01 * total  # norms are on both devices
    greedy = probe(model, int(1.2 * total), "greedy")  # the limit notices what it is there to notice
    assert greedy.returncode != 0
    assert "memory" in greedy.stderr


def test_devices_parts_make_up_the_model(model: Path) -> None:
    spec = read_spec(model)
    params = read_params(spec)
    crew = make_crew("cpu,cpu,cpu", "tensor", "3,0,1")
    split = ModelSplit(spec, params, crew, GraphOptions(64))
    shares = [split.share(device, BatchShape(1, 1)) for device in range(3)]
    seen: list[tuple[int, int]] = []
    backend = get_backend("reference")
    group = ThreadGroup([1, 1, 1])
    weights = load_weights(
        spec, shares, [backend] * 3, group.run, lambda done, total: seen.append((done, total))
    )
    group.close()
    total = sum(map(weight_bytes, shares))
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    for name in ("blk.3.attn_q.weight", "blk.5.ffn_gate.weight", "output.weight"):
        parts = [device[name].unpack() for device in weights]
        assert torch.cat(parts).equal(spec.tensor(name).unpack())
    down = [device["blk.2.ffn_down.weight"].unpack() for device in weights]
    assert torch.cat(down, 1).equal(spec.tensor("blk.2.ffn_down.weight").unpack())
    mapped = spec.tensor("token_embd.weight").data.data_ptr()
    assert all(device["token_embd.weight"].data.data_ptr() == mapped for device in weights)


def random_weight(form: str, *shape: int) -> PackedTensor:
    return PackedTensor.pack(torch.randn(shape, generator=torch.Generator().manual_seed(0)), FORMATS[form])


@pytest.mark.parametrize("form", ["F32", "BF16", "Q8_0", "Q4_K"])
def test_a_part_is_what_the_word_says(form: str) -> None:
    rng, block = random.Random(0), FORMATS[form].block_size
    weight = random_weight(form, 3, 5, 4 * block)
    for axis, unit in ((0, 1), (1, 1), (2, block)):
        owners = [rng.randrange(4) for _ in range(weight.shape[axis] // unit)]
        state = Split(axis, Word.concat(Word.of(owner, unit) for owner in owners))
        for device in range(4):
            chosen = [i for i in range(weight.shape[axis]) if owners[i // unit] == device]
            expected = weight.unpack().index_select(axis, torch.tensor(chosen, dtype=torch.int64))
            assert part_of(weight, state, device).unpack().equal(expected)


def test_a_part_in_one_range_is_a_view() -> None:
    weight = random_weight("Q8_0", 6, 64)
    part = part_of(weight, Split(0, Word.run((2, 4))), 1)
    assert part.data.data_ptr() == weight.data[2:].data_ptr()
    assert part_of(weight, MIRRORED, 1) is weight


def test_a_part_of_chosen_rows_is_a_part_of_their_sequence() -> None:
    weight, rows = random_weight("Q8_0", 6, 32), ((4, 6), (0, 1), (4, 5))
    chosen = weight.unpack()[[4, 5, 0, 4]]
    word = Word.concat([Word.of(1, 1), Word.of(0, 2), Word.of(1, 1)])
    assert part_of(weight, MIRRORED, 0, rows).unpack().equal(chosen)
    assert part_of(weight, Split(0, word), 0, rows).unpack().equal(chosen[1:3])
    assert part_of(weight, Split(0, word), 1, rows).unpack().equal(chosen[[0, 3]])
    assert part_of(weight, Split(0, word), 2, rows).shape == (0, 32)


@pytest.mark.parametrize("shape", [(2, 64), (64,)])
def test_a_cut_through_quant_blocks_is_refused(shape: tuple[int, ...]) -> None:
    weight, axis = random_weight("Q8_0", *shape), len(shape) - 1
    assert part_of(weight, Split(axis, Word.run((32, 32))), 1).shape == (*shape[:-1], 32)
    with pytest.raises(SplitError, match="cuts through Q8_0 blocks"):
        part_of(weight, Split(axis, Word.run((33, 31))), 1)
