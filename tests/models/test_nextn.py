"""Multi-token prediction layers: drafts are those of transformers' own layer, and texts stay the same.

transformers has no multi-token prediction. But the layer is like the model's last one: so a model with one layer more
is written as a file whose last layer is the prediction layer, and modules of transformers compute what it should guess.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest
import torch
from hf_to_gguf import GGUFContent, to_gguf
from tiny_models import GLM4MOE, QWEN3NEXT, TinyModel
from transformers import PreTrainedModel

from motley import LLM
from motley.engine import Engine, Request, SamplingParams
from motley.engine.drafting import Draft
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft import DraftRequest
from motley.engine.drafting.mtp import NextnLayer
from motley.errors import ConfigError, MotleyError, RequestError

PROMPTS = [[3, 250, 17, 42, 99, 7, 130, 18], list(range(5, 95)), [60, 61]]
N_DRAFT = 3
LAYERS = {
    "glm4moe": (GLM4MOE, {"num_hidden_layers": 3}),
    "qwen3next": (
        QWEN3NEXT,
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
}
OPTIONS: dict[str, Any] = {
    "n_ctx": 128,
    "n_batch": 32,
    "n_parallel": 3,
    "kv_block_size": 8,
    "spec": "mtp",
    "draft_max": N_DRAFT,
}


class Truth:
    """A model whose last layer is the prediction layer, computed by transformers."""

    def __init__(self, model: PreTrainedModel, *, is_able: bool) -> None:
        """`is_able`: the next token hardly depends on more than the last one, and the layer knows it."""
        n, generator = model.config.hidden_size, torch.Generator().manual_seed(5)
        self.model: Any = model
        self.layer = model.model.layers[-1]
        self.norms = {
            name: 1 + 0.1 * torch.randn(n, generator=generator)
            for name in ("enorm", "hnorm", "shared_head_norm")
        }
        self.projection = torch.randn(n, 2 * n, generator=generator) * 0.12
        if is_able:
            for layer in model.model.layers:
                for name, weight in layer.named_parameters():
                    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                        weight.data *= 0.001
            self.projection = torch.eye(n, 2 * n)
            self.norms = dict.fromkeys(self.norms, torch.ones(n))
            norm = to_gguf(model).tensors["output_norm.weight"]
            assert isinstance(norm, torch.Tensor)
            self.norms["shared_head_norm"] = norm

    def content(self) -> GGUFContent:
        content = to_gguf(self.model)
        number = len(self.model.model.layers) - 1
        content.metadata[f"{content.architecture}.nextn_predict_layers"] = 1
        for name, weight in (self.norms | {"eh_proj": self.projection}).items():
            content.tensors[f"blk.{number}.nextn.{name}.weight"] = weight
        return content

    def drafts(self, tokens: list[int], n_max: int) -> list[int]:
        """The greedy guesses after `tokens`."""
        with torch.inference_mode():
            inner = self.model.model
            layers, inner.layers = inner.layers, inner.layers[:-1]
            try:
                hidden = inner(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
            finally:
                inner.layers = layers
            following, found = tokens[1:], []
            for _ in range(n_max):
                out = self._run(following, hidden)
                logits = self.model.lm_head(out[-1])
                found.append(int(logits.argmax()))
                hidden = torch.cat([hidden, out[-1:]])
                following = [*following, found[-1]]
            return found

    def _run(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        inner, n = self.model.model, len(tokens)
        both = [self._norm(inner.embed_tokens(torch.tensor(tokens)), "enorm"), self._norm(hidden, "hnorm")]
        x = (torch.cat(both, 1) @ self.projection.T)[None]
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        rope = inner.rotary_emb(x, positions)
        out = self.layer(x, position_embeddings=rope, attention_mask=mask, position_ids=positions)
        return self._norm((out[0] if isinstance(out, tuple) else out)[0], "shared_head_norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.norms[name]


def truth_of(name: str, *, is_able: bool = False) -> Truth:
    model, options = LAYERS[name]
    assert isinstance(model, TinyModel)
    return Truth(model.build(**options), is_able=is_able)


@pytest.fixture(scope="module", params=LAYERS)
def able(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose prediction layer is mostly right."""
    name = request.param
    return truth_of(name, is_able=True).content().write(tmp_path_factory.mktemp("nextn") / f"{name}.gguf")


def answers(llm: LLM, spec: str, **options: Any) -> list[Request]:
    """The answers to all prompts. Steps are taken here, so that batches are always the same."""
    engine = llm._loaded.engine
    engine.speculator._control = FixedControl()
    shared = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "speculative": spec} | options
    with patch.object(Engine, "can_step", new_callable=PropertyMock, return_value=False):
        requests = [engine.add(prompt, SamplingParams(**shared)) for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
            engine.cache.check_integrity()
    return requests


@pytest.mark.parametrize("name", LAYERS)
def test_guesses_are_those_of_the_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = truth_of(name)
    path = truth.content().write(tmp_path / "nextn.gguf")
    guesses: list[tuple[list[int], tuple[int, ...]]] = []
    draft = NextnLayer.draft

    def noted(self: NextnLayer, asks: list[DraftRequest]) -> list[Draft]:
        found = draft(self, asks)
        guesses.extend((list(ask.request.tokens), each.tokens) for ask, each in zip(asks, found, strict=True))
        return found

    monkeypatch.setattr(NextnLayer, "draft", noted)
    with LLM(path, backend="reference", prefix_cache=False, **OPTIONS) as llm:
        answers(llm, "mtp", max_tokens=6)
    assert len(guesses) >= 9
    for tokens, guess in guesses:
        assert list(guess) == truth.drafts(tokens, len(guess)), tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "reference"},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"devices": "cpu,cpu", "split_mode": "tensor"},
        {"devices": "cpu,cpu", "split_mode": "layer"},
        {"kv_cache_tokens": 128},
    ],
    ids=["cpu", "reference", "quantized cache", "tensor", "layer", "preempted"],
)
def test_texts_are_the_same(able: Path, options: dict[str, Any]) -> None:
    with LLM(able, **(OPTIONS | options)) as llm:
        for sampling in ({}, {"temperature": 1.0, "seed": 7}):
            without = answers(llm, "off", **sampling)
            found = answers(llm, "mtp", **sampling)
            assert [r.generated for r in found] == [r.generated for r in without]
        counts = [r.drafts["mtp"] for r in found]
        n_drafted, n_accepted = (sum(getattr(c, n) for c in counts) for n in ("drafted", "accepted"))
        assert n_accepted > n_drafted / 3
        assert llm.memory()["draft_model"] > 0
        for companion in llm._loaded.companions:
            companion._cache.check_integrity()


def next_probs(llm: LLM, tokens: list[int], among: list[int], top_p: float) -> dict[int, float]:
    """The probabilities of the next token, if it is one of `among`: temperature 1, the smallest set of `top_p`."""
    logits = llm.logits(tokens)[-1].astype(np.float64)[among]
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = order[: int(np.searchsorted(probs[order].cumsum(), top_p)) + 1]
    return {among[i]: float(probs[i] / probs[kept].sum()) for i in kept.tolist()}


@pytest.mark.slow
def test_two_tokens_have_the_models_joint_distribution(able: Path) -> None:
    """A chi-squared test of tokens 2 and 3, of which drafts are computed: temperature 1 and top-p, eight tokens."""
    n_draws, top_p, prompt, among = 1200, 0.9, PROMPTS[0], [5, 30, 61, 90, 111, 140, 170, 201]
    bias = dict.fromkeys(among, 90.0)
    with LLM(able, **(OPTIONS | {"n_parallel": 16, "n_batch": 256})) as llm:
        engine, found = llm._loaded.engine, Counter[tuple[int, ...]]()
        engine.speculator._control = FixedControl()
        n_accepted = 0
        with patch.object(Engine, "can_step", new_callable=PropertyMock, return_value=False):
            for first in range(0, n_draws, 16):
                sampling = [
                    SamplingParams(
                        temperature=1, top_k=0, top_p=top_p, min_p=0, seed=seed, max_tokens=4, ignore_eos=True,
                        logit_bias=bias, speculative="mtp",
                    )
                    for seed in range(first, first + 16)
                ]  # fmt: skip
                requests = [engine.add(prompt, each) for each in sampling]
                while engine.has_work:
                    engine.step()
                found.update(tuple(request.generated[:3]) for request in requests)
                n_accepted += sum(r.drafts["mtp"].accepted for r in requests if "mtp" in r.drafts)
        expected = {
            (a, b, c): p * q * r
            for a, p in next_probs(llm, prompt, among, top_p).items()
            for b, q in next_probs(llm, [*prompt, a], among, top_p).items()
            for c, r in next_probs(llm, [*prompt, a, b], among, top_p).items()
        }
    assert n_accepted > n_draws / 8
    assert set(found) <= set(expected)
    cells = [key for key, p in expected.items() if p * n_draws >= 5]
    assert len(cells) > 8
    means = np.array([n_draws * expected[key] for key in cells])
    counts = np.array([found[key] for key in cells], dtype=np.float64)
    means, counts = (np.append(each, n_draws - each.sum()) for each in (means, counts))
    n = len(cells)
    statistic = float(((counts - means) ** 2 / np.maximum(means, 1e-9)).sum())
    z = ((statistic / n) ** (1 / 3) - (1 - 2 / (9 * n))) / (2 / (9 * n)) ** 0.5  # Wilson and Hilferty
    assert abs(z) < 3.3, (z, statistic, n)


def test_prefix_hits_and_shifts_make_the_layers_context_shorter(able: Path) -> None:
    is_recurrent = "qwen3next" in able.name
    with LLM(able, **(OPTIONS | {"n_ctx": 48})) as llm:
        options = {} if is_recurrent else {"context_shift": True, "n_keep": 2, "max_tokens": 70}
        prompts = [[*range(5, 35)], [*range(5, 35), 40, 41]]
        for prompt in prompts:  # the second one begins with the blocks of the first
            without = llm.generate(prompt, temperature=0, ignore_eos=True, **({"max_tokens": 9} | options))
            llm._loaded.engine.speculator._control = FixedControl()
            found = llm.generate(
                prompt, temperature=0, ignore_eos=True, speculative="mtp", **({"max_tokens": 9} | options)
            )
            assert found.tokens == without.tokens
            assert found.timings.drafts["mtp"].accepted


def test_a_recurrent_model_drafts_neither_with_its_first_layers_nor_for_another_one(tmp_path: Path) -> None:
    """Drafted tokens would stay in its states."""
    path = truth_of("qwen3next").content().write(tmp_path / "qwen3next.gguf")
    with pytest.raises(ConfigError, match=r"qwen3next\.gguf cannot be a draft model: .* recurrent state"):
        LLM(path, draft_model=path, n_ctx=64)
    with pytest.raises(RequestError, match=r"'exit' is not possible: .* recurrent state"):
        LLM(path, spec="exit", n_ctx=64)
    with LLM(path, **OPTIONS) as llm, pytest.raises(RequestError, match="recurrent state"):
        llm.generate(PROMPTS[0], speculative="mtp,exit")


def test_a_layer_that_fails_is_left_out(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(able, **OPTIONS) as llm:
        without = answers(llm, "off")

        def failing(*_: Any) -> Any:
            raise MemoryError

        monkeypatch.setattr(NextnLayer, "_run", failing)
        assert [r.generated for r in answers(llm, "mtp")] == [r.generated for r in without]


def test_files_and_devices_without_the_layer_are_refused(able: Path, bundled: Path) -> None:
    with pytest.raises(RequestError, match="no multi-token prediction layer"):
        LLM(bundled, spec="mtp")
    with (
        LLM(able, **(OPTIONS | {"spec": "off"})) as llm,
        pytest.raises(RequestError, match="was loaded without it"),
    ):
        llm.generate([1, 2], speculative="mtp")
    with pytest.raises(MotleyError, match="multi-token prediction layer"):
        LLM(able, device_memory="100KiB", **OPTIONS)


def test_a_file_without_the_layers_tensors_is_refused(tmp_path: Path) -> None:
    content = truth_of("glm4moe").content()
    del content.tensors["blk.2.nextn.eh_proj.weight"]
    path = content.write(tmp_path / "broken.gguf")
    for spec in ("mtp", "off"):
        with pytest.raises(MotleyError, match=r"nextn\.eh_proj"):
            LLM(path, **(OPTIONS | {"spec": spec}))


def test_other_hosts_and_several_gpus_are_refused(able: Path) -> None:
    from motley.engine.drafting.loading import nextn_companion
    from motley.gguf import read_spec
    from motley.models import read_params
    from motley.runtime import Crew, make_crew

    spec = read_spec(able)

    def crew_of(*names: str) -> Crew:  # as if there were GPUs
        crew = make_crew("cpu,cpu")
        own = tuple(replace(device, name=name) for device, name in zip(crew.devices, names, strict=True))
        return replace(crew, devices=own)

    hosts = make_crew("cpu,cpu@127.0.0.1:29400")
    for crew in (hosts, crew_of("cuda:0", "cuda:1"), crew_of("cuda:0", "cpu")):
        with pytest.raises(ConfigError, match="one GPU or on CPU devices of one host only"):
            nextn_companion(spec, read_params(spec), crew)
    assert nextn_companion(spec, read_params(spec), crew_of("cuda:0", "cuda:0")).params.is_nextn
