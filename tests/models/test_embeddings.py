"""Embeddings: hidden states after the final norm, against transformers, backends and crews."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_to_gguf import to_gguf
from tiny_models import GEMMA3, LLAMA, QWEN3MOE, TinyModel, random_tokens

from motley import LLM
from motley.engine.embedding import choose_pooling
from motley.errors import RequestError

TEXT = "Once upon a time there was a fox who lived near the river and had a red kite."
EXACT: dict[str, Any] = {"backend": "reference", "cache_type_k": "f32", "cache_type_v": "f32"}


@pytest.fixture(scope="module")
def llm(bundled: Path) -> Iterator[LLM]:
    with LLM(bundled, n_ctx=128) as llm:
        yield llm


@pytest.mark.parametrize("model", [LLAMA, GEMMA3, QWEN3MOE], ids=lambda model: model.name)
def test_hidden_states_are_those_of_transformers(model: TinyModel, tmp_path: Path) -> None:
    reference = model.build()
    path = to_gguf(reference).write(tmp_path / "model.gguf")
    tokens = random_tokens(40, seed=1)
    with torch.inference_mode():
        output = reference(torch.tensor([tokens]), output_hidden_states=True)
    expected = output.hidden_states[-1][0].numpy()  # transformers gives the last one after the norm
    with LLM(path, n_ctx=model.n_ctx, n_batch=16, **EXACT) as llm:
        found = llm.embed(tokens, pooling="none", normalize=False)
        logits = llm.logits(tokens)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-3
    assert np.abs(logits - output.logits[0].numpy()).max() <= 1e-2  # other batches are as before


def test_backends_and_crews_agree(llm: LLM, bundled: Path) -> None:
    wanted = llm.embed(TEXT)
    crews: list[dict[str, Any]] = [
        EXACT,
        {"n_batch": 8},
        {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
        {"devices": "cpu,cpu", "split_mode": "layer"},
    ]
    for options in crews:
        with LLM(bundled, n_ctx=128, **options) as other:
            assert float(other.embed(TEXT) @ wanted) > 0.999, options


def test_pooling_is_that_of_the_rows(llm: LLM) -> None:
    rows = llm.embed(TEXT, pooling="none", normalize=False)
    assert rows.shape == (len(llm.tokenizer.encode(TEXT)), llm.n_embd)
    assert rows.dtype == np.float32
    plain = {"normalize": False}
    assert np.allclose(llm.embed(TEXT, pooling="mean", **plain), rows.mean(0), atol=1e-5)
    assert np.array_equal(llm.embed(TEXT, pooling="last", **plain), rows[-1])
    assert np.array_equal(llm.embed(TEXT, pooling="cls", **plain), rows[0])
    assert np.allclose(llm.embed(TEXT), rows.mean(0) / np.linalg.norm(rows.mean(0)), atol=1e-6)
    assert np.allclose(np.linalg.norm(llm.embed(TEXT, pooling="none"), axis=1), 1, atol=1e-5)


def test_a_list_of_texts(llm: LLM) -> None:
    texts = [TEXT, "The sea", llm.tokenizer.encode("The sea")]
    found = llm.embed(texts)
    assert found.shape == (3, llm.n_embd)
    assert np.array_equal(found[0], llm.embed(TEXT))
    assert np.array_equal(found[1], found[2])
    assert llm.embed([]).shape == (0, llm.n_embd)
    assert [len(rows) for rows in llm.embed(texts[1:], pooling="none")] == [3, 3]


def test_embeddings_leave_the_cache_as_it_was(llm: LLM) -> None:
    cache = llm._loaded.cache
    llm.embed(TEXT)
    before = llm._call(lambda: cache.n_free_tokens)
    llm.embed([TEXT] * 3)
    assert llm._call(lambda: cache.n_free_tokens) == before


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        (TEXT, {"pooling": "max"}, "pooling"),
        (["One", b"Two"], {}, r"texts\[1\]"),
        (["One", ""], {}, None),
        (["One", []], {}, r"texts\[1\]"),
        (list(range(5, 205)), {}, "context"),
        (3, {}, "prompt"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_named(llm: LLM, texts: Any, options: Any, said: str | None) -> None:
    if said is None:
        assert llm.embed(texts, **options).shape == (2, llm.n_embd)  # the token that begins a text is one
        return
    with pytest.raises(RequestError, match=said):
        llm.embed(texts, **options)


def test_the_file_may_name_its_pooling() -> None:
    assert choose_pooling(None, {"llama.pooling_type": 3}, "llama") == "last"
    assert choose_pooling(None, {"llama.pooling_type": 0}, "llama") == "mean"
    assert choose_pooling(None, {}, "llama") == "mean"
    assert choose_pooling("cls", {"llama.pooling_type": 3}, "llama") == "cls"
