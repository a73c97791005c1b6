"""Every architecture, in every variant, gives the logits of transformers; however its tokens are batched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hf_to_gguf import pack_matrices, to_gguf
from model_driver import ModelDriver, logits_of
from tiny_models import (
    GEMMA3_27B,
    GLM4MOE,
    GPT_OSS,
    LINEAR,
    LLAMA,
    LONGROPE,
    QWEN3MOE,
    SOFT_CAPPED,
    TINY_MODELS,
    TinyModel,
    hf_logits,
    random_tokens,
)

from motley import LLM
from motley.gguf import read_spec
from motley.models import ARCHITECTURES, BatchShape, GraphOptions, read_params
from motley.runtime import ModelSplit, make_crew

TOLERANCE = 1e-3  # against transformers
# Each model runs on two of them, and on UNEQUAL, where one device has all heads, or all of the FFN, of some layers.
CREWS = ((1, 1), (3, 1), (2, 1, 1), (1, 0, 1), (1, 1, 1, 1), (1,) * 5, (1,) * 7)
UNEQUAL = (3, 2)
BATCHING_TOLERANCE = 1e-4  # of one engine against itself
WITH_STATES = ("qwen3next", "qwen35", "qwen35moe")
STATE_TOLERANCE = 5e-4  # the same with recurrent states, where rounding errors of all rows add up


@dataclass(frozen=True)
class Converted:
    """A tiny model as a file in use, a text, and both engines' logits for it."""

    model: TinyModel
    driver: ModelDriver
    tokens: list[int]
    expected: torch.Tensor  # transformers'
    logits: torch.Tensor  # Motley's, of all tokens at once

    @property
    def tolerance(self) -> float:
        """Of Motley against itself."""
        return STATE_TOLERANCE if self.model.architecture in WITH_STATES else BATCHING_TOLERANCE


@pytest.fixture(scope="module", params=TINY_MODELS, ids=lambda model: model.name)
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Converted]:
    model: TinyModel = request.param
    reference = model.build()
    path = to_gguf(reference).write(tmp_path_factory.mktemp("models") / "model.gguf")
    tokens = random_tokens(model.n_tokens, seed=1)
    with closing(ModelDriver(path, model.n_ctx)) as driver:
        yield Converted(model, driver, tokens, hf_logits(reference, tokens), driver.logits(tokens))


def test_logits_are_those_of_transformers(converted: Converted) -> None:
    assert _difference(converted.logits, converted.expected) <= TOLERANCE


def test_crews_give_the_same_logits_and_the_same_choices(converted: Converted) -> None:
    n_tokens, model = 24, converted.model
    start = TINY_MODELS.index(model)
    for crew in (CREWS[start % len(CREWS)], CREWS[(start + 3) % len(CREWS)], UNEQUAL):
        with closing(ModelDriver(converted.driver.path, model.n_ctx, crew)) as driver:
            logits = driver.logits(converted.tokens[:n_tokens])
        assert _difference(logits, converted.logits[:n_tokens]) <= TOLERANCE, crew
        assert torch.equal(logits.argmax(-1), converted.logits[:n_tokens].argmax(-1)), crew


def test_no_layer_has_more_than_two_collectives_however_unequal_the_crew_is(converted: Converted) -> None:
    """Also where one device has all heads of a layer, another one its FFN of one unit. One more gathers the logits."""
    spec = read_spec(converted.driver.path)
    params = read_params(spec)
    for shares in (UNEQUAL, (1, 3), (3, 1), (20, 0, 3, 2), (1, 3, 20, 2), (1,) * 20):
        for way in ("ffn", "whole"):
            crew = make_crew(["cpu"] * len(shares), "tensor", shares, split_experts=way)
            split = ModelSplit(spec, params, crew, GraphOptions(converted.model.n_ctx))
            found = split.split(BatchShape(1, 1)).collectives
            assert len(found) <= 2 * params.n_layers + 1, (shares, way)


def test_every_architecture_is_compared() -> None:
    assert {model.architecture for model in TINY_MODELS} == set(ARCHITECTURES)


@pytest.mark.parametrize("model", [m for m in TINY_MODELS if m.has_own_rope], ids=lambda model: model.name)
def test_comparison_would_notice_rope_options_that_are_ignored(model: TinyModel) -> None:
    tokens = random_tokens(model.n_tokens, seed=1)
    plain = model.build(rope_parameters=None)
    assert _difference(hf_logits(plain, tokens), hf_logits(model.build(), tokens)) > 1000 * TOLERANCE


def test_chunks_of_any_size_give_the_same_logits(converted: Converted) -> None:
    sizes = list(_random_sizes(random.Random(2), len(converted.tokens)))
    logits = converted.driver.logits(converted.tokens, sizes)
    assert _difference(logits, converted.logits) <= converted.tolerance


def test_prompt_and_then_token_by_token_gives_the_same_logits(converted: Converted) -> None:
    n_single = 30
    sizes = [len(converted.tokens) - n_single, *[1] * n_single]
    one_by_one = converted.driver.logits(converted.tokens, sizes)
    assert _difference(one_by_one, converted.logits) <= converted.tolerance


def test_sequences_in_one_batch_do_not_see_each_other(converted: Converted) -> None:
    rng, driver = random.Random(3), converted.driver
    texts = [converted.tokens, *(random_tokens(n, seed=n) for n in (converted.model.n_tokens, 17))]
    alone = [converted.logits, *(driver.logits(text) for text in texts[1:])]
    pieces = {driver.open(): _random_pieces(rng, text) for text in texts}
    parts: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in pieces}
    while waiting := [sequence for sequence, rest in pieces.items() if rest]:
        turn = rng.sample(waiting, rng.randint(1, len(waiting)))  # in any order
        for sequence, logits in driver.step({sequence: pieces[sequence].pop(0) for sequence in turn}).items():
            parts[sequence].append(logits)
    for sequence, expected in zip(parts, alone, strict=True):
        assert _difference(torch.cat(parts[sequence]), expected) <= converted.tolerance
        driver.free(sequence)


def test_context_size_chooses_the_longrope_factors(tmp_path: Path) -> None:
    """Transformers goes by the length of a text instead; with equal factors it has no choice."""
    options = LONGROPE.options
    original, rope = options["original_max_position_embeddings"], options["rope_parameters"]
    path = to_gguf(LONGROPE.build()).write(tmp_path / "model.gguf")
    tokens = random_tokens(30, seed=4)
    expected = []
    for n_ctx, chosen in ((original, rope["short_factor"]), (original + 1, rope["long_factor"])):
        equal = LONGROPE.build(rope_parameters=rope | {"short_factor": chosen, "long_factor": chosen})
        expected.append(hf_logits(equal, tokens))
        assert _difference(logits_of(path, tokens, n_ctx), expected[-1]) <= TOLERANCE
    assert _difference(*expected) > 1000 * TOLERANCE


def test_the_range_of_gpt_oss_ropes_is_not_rounded() -> None:
    """Rounding it would show in the comparison above."""
    rope = GPT_OSS.options["rope_parameters"]
    tokens = random_tokens(GPT_OSS.n_tokens, seed=1)
    rounded = GPT_OSS.build(rope_parameters=rope | {"truncate": True})
    assert _difference(hf_logits(rounded, tokens), hf_logits(GPT_OSS.build(), tokens)) > 10 * TOLERANCE


def test_layers_that_predict_further_tokens_are_left_aside(tmp_path: Path) -> None:
    reference, tokens = GLM4MOE.build(), random_tokens(40, seed=6)
    content = to_gguf(reference)
    n_layers = content.metadata["glm4moe.block_count"]
    assert isinstance(n_layers, int)
    content.metadata.update({"glm4moe.block_count": n_layers + 1, "glm4moe.nextn_predict_layers": 1})
    last, extra = f"blk.{n_layers - 1}.", f"blk.{n_layers}."
    for name in [name for name in content.tensors if name.startswith(last)]:
        content.tensors[name.replace(last, extra)] = content.tensors[name]
    for name, shape in {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,)}.items():
        content.tensors[f"{extra}nextn.{name}.weight"] = torch.ones(shape)
    logits = logits_of(content.write(tmp_path / "model.gguf"), tokens, n_ctx=64)
    assert _difference(logits, hf_logits(reference, tokens)) <= TOLERANCE


@pytest.mark.parametrize("model", [GLM4MOE, GPT_OSS, QWEN3MOE], ids=lambda model: model.name)
@pytest.mark.parametrize("n_used", [1, 3, 7])
def test_another_number_of_experts_is_that_of_transformers(
    tmp_path: Path, model: TinyModel, n_used: int
) -> None:
    """Fewer and more than the file says."""
    path = to_gguf(model.build()).write(tmp_path / "model.gguf")
    tokens = random_tokens(40, seed=6)
    expected = hf_logits(model.build(num_experts_per_tok=n_used), tokens)
    with LLM(path, n_ctx=64, cache_type_k="f32", cache_type_v="f32", backend="reference") as llm:
        logits = torch.from_numpy(llm.logits(tokens, n_expert_used=n_used))
    assert _difference(logits, expected) <= TOLERANCE


def test_scores_of_62_layers_are_scaled_by_the_width_of_a_head_s_share(tmp_path: Path) -> None:
    """And by the head's own width in a model of any other depth; and by what the file says, where it does."""
    tokens = random_tokens(24, seed=8)
    reference = GEMMA3_27B.build()
    content = to_gguf(reference)
    expected = hf_logits(reference, tokens)
    found = logits_of(content.write(tmp_path / "model.gguf"), tokens, n_ctx=64)
    assert _difference(found, expected) <= TOLERANCE
    content.metadata["gemma3.attention.scale"] = 16**-0.5
    other = hf_logits(GEMMA3_27B.build(query_pre_attn_scalar=16), tokens)
    found = logits_of(content.write(tmp_path / "other.gguf"), tokens, n_ctx=64)
    assert _difference(found, other) <= TOLERANCE
    assert _difference(expected, other) > 100 * TOLERANCE  # the comparison can tell


@pytest.mark.parametrize("backend", ["cpu", "cpu-exact"])
def test_native_logits_are_soft_capped_as_well(tmp_path: Path, backend: str) -> None:
    path = to_gguf(SOFT_CAPPED.build()).write(tmp_path / "model.gguf")
    tokens = random_tokens(24, seed=9)
    with LLM(path, n_ctx=64, cache_type_k="f32", cache_type_v="f32", backend=backend) as llm:
        found = torch.from_numpy(llm.logits(tokens))
    expected = hf_logits(SOFT_CAPPED.build(), tokens)
    plain = hf_logits(SOFT_CAPPED.build(final_logit_softcapping=None), tokens)
    assert _difference(found, expected) <= TOLERANCE
    assert plain.abs().max() > 3 > expected.abs().max()  # the comparison can tell


def test_rope_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    reference, tokens = LINEAR.build(), random_tokens(40, seed=6)
    content = to_gguf(reference)
    del content.metadata["llama.rope.scaling.type"]
    logits = logits_of(content.write(tmp_path / "model.gguf"), tokens, n_ctx=64)
    assert _difference(logits, hf_logits(reference, tokens)) <= TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "format_name", "width"),
    [("llama", "Q8_0", 64), ("qwen2", "F16", 64), ("phi3", "Q4_0", 64), ("qwen3", "Q4_K", 256)],
)
def test_packed_weights_count_as_the_values_they_stand_for(
    tmp_path: Path, architecture: str, format_name: str, width: int
) -> None:
    sizes = {"hidden_size": width, "intermediate_size": width, "head_dim": width // 4}
    reference = TinyModel("packed", architecture, sizes).build()
    packed = pack_matrices(reference, format_name)
    path = to_gguf(reference, packed).write(tmp_path / "model.gguf")
    tokens = random_tokens(40, seed=5)
    logits = logits_of(path, tokens, n_ctx=64)
    assert _difference(logits, hf_logits(reference, tokens)) <= TOLERANCE


def test_engine_continues_a_prompt_as_transformers_does(tmp_path: Path) -> None:
    reference = LLAMA.build()
    path = to_gguf(reference).write(tmp_path / "model.gguf")
    with LLM(path, cache_type_k="f32", cache_type_v="f32") as llm:
        prompt = llm.tokenizer.encode("the")
        completion = llm.generate("the", max_tokens=8, temperature=0, ignore_eos=True)
    expected = list(prompt)
    for _ in range(8):
        expected.append(int(hf_logits(reference, expected)[-1].argmax()))
    assert [*prompt, *completion.tokens] == expected


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def _random_sizes(rng: random.Random, total: int) -> Iterator[int]:
    while total:
        size = min(rng.choice([1, 2, 7, 16, 33]), total)
        yield size
        total -= size


def _random_pieces(rng: random.Random, tokens: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in _random_sizes(rng, len(tokens)):
        pieces.append(tokens[start : start + size])
        start += size
    return pieces
