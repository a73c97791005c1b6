"""A split cache answers as a whole one does: every pair of types, on even and uneven crews.

The last bits of sums depend on the split, and may move a value from one code of a quantizer to the next. So the prompts
are those of the goldens' tokens after which the likeliest token leads clearly for every pair of types that is tested:
by 0.28 (phi3) and 0.10 (llama) in the logits, at each of the new tokens. No mismatch is a tie.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from motley import LLM
from motley.kvcache.types import CACHE_TYPES

N_NEW = 4
# phi3 has fused QKV, two layers and heads of 96 dims (three tiles, rotated by 32); llama four layers and heads of 64.
PROMPTS = {"phi3": slice(117, 126), "llama": slice(90, 99)}
CREWS = ((1, 1), (3, 1), (2, 1, 1))


@cache
def greedy(
    folder: Path, k_type: str, v_type: str, mode: str = "none", shares: tuple[int, ...] = (1,)
) -> list[int]:
    prompt = np.load(folder / "tokens.npy")[PROMPTS[folder.name]].tolist()
    with LLM(
        folder / "model.gguf",
        n_ctx=len(prompt) + N_NEW,
        n_batch=len(prompt),  # so that there are but two shapes of batches to plan for
        n_parallel=1,
        cache_type_k=k_type,
        cache_type_v=v_type,
        backend="reference",
        devices=["cpu"] * len(shares),
        split_mode=mode,
        tensor_split=shares,
    ) as llm:
        return list(llm.stream(prompt, max_tokens=N_NEW, temperature=0, ignore_eos=True).finish().tokens)


@pytest.mark.slow  # 81 pairs; the tests below take some of them
@pytest.mark.parametrize(("k_type", "v_type"), list(product(CACHE_TYPES, repeat=2)))
def test_every_pair_of_types_on_every_crew(shared: Path, k_type: str, v_type: str) -> None:
    folder = shared / "golden" / "phi3"
    alone = greedy(folder, k_type, v_type)
    assert len(alone) == N_NEW
    for crew in CREWS:
        assert greedy(folder, k_type, v_type, "tensor", crew) == alone, crew


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_the_same_type_for_both_in_a_deeper_model(shared: Path, kind: str) -> None:
    folder = shared / "golden" / "llama"
    assert greedy(folder, kind, kind, "tensor", (2, 1, 1)) == greedy(folder, kind, kind)


@pytest.mark.parametrize("crew", [(1, 1), (3, 1), (0, 2, 1)])
@pytest.mark.parametrize(("k_type", "v_type"), [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f32", "q4_0")])
def test_whole_layers_on_each_device(shared: Path, k_type: str, v_type: str, crew: tuple[int, ...]) -> None:
    folder = shared / "golden" / "llama"
    assert greedy(folder, k_type, v_type, "layer", crew) == greedy(folder, k_type, v_type)


@pytest.mark.parametrize(("k_type", "v_type"), [("q8_0", "q4_0"), ("q4_0", "f16")])
def test_a_device_without_a_share_stores_nothing_and_changes_nothing(
    shared: Path, k_type: str, v_type: str
) -> None:
    folder = shared / "golden" / "phi3"
    assert greedy(folder, k_type, v_type, "tensor", (1, 0, 2)) == greedy(folder, k_type, v_type)
