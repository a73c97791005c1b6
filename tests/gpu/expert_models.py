"""Small models with experts, made from random numbers, and how far their logits may be from the reference's.

Nothing is downloaded. Sizes are such that a GPU uses the kernels of real models: heads of 64 dims, experts in MXFP4
or Q4_K, a number of experts that a token does not use up. Vectors that files of trained models have are random, too:
attention sinks, biases of every kind, norms. `test_cuda_expert_models.py` runs the same comparison in Triton's
interpreter, and shows that the bounds notice each of these vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gguf import GGMLQuantizationType, GGUFWriter
from motley import LLM
from motley.formats import PackedTensor, get_format

N_VOCAB, EMBD, DIM, HEADS, KV_HEADS, FF = 320, 256, 64, 8, 2, 256
EXPERTS, USED = 16, 4
WINDOW = 32
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ExpertModel:
    """An architecture, with what its files have besides attention and experts."""

    architecture: str
    experts_format: str
    matrices_format: str = "Q8_0"
    n_layers: int = 3
    expert_ff: int = 256
    keys: Mapping[str, Any] = field(default_factory=dict)
    n_dense: int = 0
    has_shared: bool = False

    def tensors(self) -> dict[str, PackedTensor]:
        """All tensors of the file, the same ones at each call."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (N_VOCAB, EMBD),
            "output_norm.weight": (EMBD,),
            "output.weight": (N_VOCAB, EMBD),
        }
        for layer in range(self.n_layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self._layer(layer).items()}
        generator = torch.Generator().manual_seed(3)
        return {name: self._packed(name, shape, generator) for name, shape in shapes.items()}

    def metadata(self) -> dict[str, Any]:
        """With the architecture's prefix."""
        numbers: dict[str, Any] = {
            "context_length": 512,
            "embedding_length": EMBD,
            "block_count": self.n_layers,
            "feed_forward_length": FF,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": DIM,
            "attention.value_length": DIM,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
            "expert_count": EXPERTS,
            "expert_used_count": USED,
            "expert_feed_forward_length": self.expert_ff,
        }
        return {f"{self.architecture}.{key}": value for key, value in (numbers | dict(self.keys)).items()}

    def write(self, path: Path, tensors: Mapping[str, PackedTensor] | None = None) -> Path:
        """The file, with `tensors` instead of its own."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata().items():
            _add(writer, key, value)
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(N_VOCAB)
        for name, tensor in (self.tensors() if tensors is None else tensors).items():
            kind = GGMLQuantizationType[tensor.format.name]
            if kind == GGMLQuantizationType.F32:
                writer.add_tensor(name, tensor.unpack().numpy())
            else:
                writer.add_tensor(name, tensor.data.numpy(), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _layer(self, layer: int) -> dict[str, tuple[int, ...]]:
        is_gpt, is_glm = self.architecture == "gpt-oss", self.architecture == "glm4moe"
        second_norm = "post_attention_norm" if is_gpt or is_glm else "ffn_norm"
        names: dict[str, tuple[int, ...]] = {"attn_norm.weight": (EMBD,), f"{second_norm}.weight": (EMBD,)}
        sizes = {"q": (HEADS * DIM, EMBD), "k": (KV_HEADS * DIM, EMBD), "v": (KV_HEADS * DIM, EMBD)}
        sizes["output"] = (EMBD, HEADS * DIM)
        biased = ("q", "k", "v", "output") if is_gpt else "qkv" if is_glm else ""
        names |= {f"attn_{part}.weight": shape for part, shape in sizes.items()}
        names |= {f"attn_{part}.bias": sizes[part][:1] for part in biased}
        if is_gpt:
            names["attn_sinks.weight"] = (HEADS,)
        else:
            names |= {f"attn_{part}_norm.weight": (DIM,) for part in "qk"}
        if layer < self.n_dense:
            return names | _ffn("", (FF,), EMBD)
        names |= _ffn("_exps", (EXPERTS, self.expert_ff), EMBD) | {"ffn_gate_inp.weight": (EXPERTS, EMBD)}
        if self.has_shared:
            names |= _ffn("_shexp", (self.expert_ff,), EMBD)
        if is_glm:
            names["exp_probs_b.bias"] = (EXPERTS,)
        if is_gpt:
            names["ffn_gate_inp.bias"] = (EXPERTS,)
            names |= {f"ffn_{part}_exps.bias": (EXPERTS, self.expert_ff) for part in ("gate", "up")}
            names["ffn_down_exps.bias"] = (EXPERTS, EMBD)
        return names

    def _packed(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> PackedTensor:
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            return PackedTensor.pack(1 + 0.3 * noise, get_format("F32"))
        if name.endswith("bias"):
            return PackedTensor.pack(0.5 * noise, get_format("F32"))
        if "sinks" in name:  # scores of one token have about the same size
            return PackedTensor.pack(1 + noise, get_format("F32"))
        # Routers choose clearly, so that rounding seldom changes a token's experts.
        scale = 4.0 if "gate_inp" in name else 1.0
        form = (
            "F32" if "gate_inp" in name else self.experts_format if "exps" in name else self.matrices_format
        )
        return PackedTensor.pack(noise * scale * shape[-1] ** -0.5, get_format(form))


def _ffn(suffix: str, rows: tuple[int, ...], n_embd: int) -> dict[str, tuple[int, ...]]:
    up = (*rows, n_embd)
    down = (*rows[:-1], n_embd, rows[-1])
    return {f"ffn_gate{suffix}.weight": up, f"ffn_up{suffix}.weight": up, f"ffn_down{suffix}.weight": down}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_string(key, value)


MODELS = (
    # Half of the layers see 32 tokens. The hidden values are five blocks of MXFP4: two devices share them 3 : 2.
    ExpertModel(
        "gpt-oss",
        "MXFP4",
        expert_ff=160,
        keys={
            "attention.sliding_window": WINDOW,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    # A dense layer first; sigmoid scores with a bias, limited to two of four groups; a shared expert.
    ExpertModel(
        "glm4moe",
        "Q4_K",
        n_dense=1,
        has_shared=True,
        keys={
            "rope.dimension_count": DIM // 2,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_gating_func": 2,
        },
    ),
    ExpertModel("qwen3vlmoe", "Q4_K", matrices_format="Q4_K"),
)


@dataclass(frozen=True)
class Bounds:
    """How far logits may be from the reference's: ‖difference‖ / ‖logits‖ of a row, the median.

    In decode, activations have 8 bits with a scale for each 32: each product is wrong by 0.5 % of its norm (a step of
    1/127 of the largest of 32 normal numbers, over √12), the dozen products of three layers by about 2 % together, and
    a quantized cache adds about 1 %. Rows of prompts are multiplied with activations of 16 bits: what is left is the
    cache. Interpreted kernels are at 0.3 % (prompt) and 2 % (decode). Rounding may choose another expert for a row, so
    only a `share` of all rows must be within the bound. What may be forgotten (sinks, biases, window, YaRN, groups)
    moves a row by 11 to 100 % (`test_the_bounds_notice_what_is_forgotten`).
    """

    prompt: float = 0.02
    decode: float = 0.06
    share: float = 0.75

    def allowed(self, row: Floats) -> float:
        """How far two logits may come closer: four standard deviations of the difference of two of them."""
        return float(4 * 2**0.5 * self.decode * np.linalg.norm(row) / len(row) ** 0.5)


BOUNDS = Bounds()
PROMPTS = (1, 5, 9, 40, 150)  # few rows, bundles, tiles, more than the window, more than a batch of logits
N_DECODE = 12


def tokens_of(n: int) -> list[int]:
    return [(7 * i * i + 11 * i + 3 * n) % (N_VOCAB - 8) for i in range(n)]


@dataclass(frozen=True)
class Found:
    """Logits after a prompt's last tokens, and of the tokens after it one by one. (rows, vocab)"""

    prompt: Floats
    decode: Floats


def logits_of(llm: LLM, n_prompt: int, n_decode: int = N_DECODE, n_outputs: int = 16) -> Found:
    tokens = tokens_of(n_prompt + n_decode)
    with llm.raw_sequence() as sequence:
        prompt = sequence.feed(tokens[:n_prompt], n_outputs=n_outputs)
        rows = [sequence.feed([token]) for token in tokens[n_prompt:]]
    return Found(prompt.numpy(), np.concatenate([row.numpy() for row in rows]))


def check_logits(found: Mapping[int, Found], expected: Mapping[int, Found], bounds: Bounds = BOUNDS) -> str:
    """Compares logits by length of the prompt. Returns how far they are from each other."""
    worst: list[str] = []
    for kind, bound in (("prompt", bounds.prompt), ("decode", bounds.decode)):
        pairs = [
            (getattr(found[n], kind), getattr(expected[n], kind))
            for n in found
            if kind == "decode" or n > 8  # up to eight rows are computed as in decode
        ]
        if not pairs:
            continue
        ours, theirs = (np.concatenate(each) for each in zip(*pairs, strict=True))
        assert np.isfinite(ours).all(), kind
        errors = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        worst.append(f"{kind}: median {np.median(errors):.4f}, largest {errors.max():.4f}, bound {bound}")
        assert np.median(errors) <= bound, worst
        assert (errors <= bound).mean() >= bounds.share, worst
        check_choices(ours.argmax(1), theirs, bounds)
    return "; ".join(worst)


def check_choices(tokens: Sequence[int] | npt.NDArray[np.int64], expected: Floats, bounds: Bounds) -> None:
    """Greedy choices are those of the reference's logits where its best logit is ahead by more than rounding.

    A token in twenty may be another one, because another expert was chosen.
    """
    behind = [float(row.max() - row[token]) for token, row in zip(tokens, expected, strict=True)]
    is_close = [gap <= bounds.allowed(row) for gap, row in zip(behind, expected, strict=True)]
    assert sum(is_close) >= 0.95 * len(is_close) - 1, behind


def check_answers(llm: LLM, reference: LLM, prompts: Sequence[int], n_new: int = 24) -> str:
    """Greedy answers to all prompts at once: each token is the reference's best after the same tokens, or near it."""
    given = [tokens_of(n) for n in prompts]
    answers = llm.generate(given, max_tokens=n_new, temperature=0.0, ignore_eos=True, speculative="off")
    n_same = n_tokens = 0
    for prompt, answer in zip(given, answers, strict=True):
        assert answer.error is None, answer.error
        text = list(answer.tokens)
        assert len(text) == n_new
        rows = reference.logits([*prompt, *text[:-1]])[len(prompt) - 1 :]
        check_choices(text, rows, BOUNDS)
        n_same += int((rows.argmax(1) == text).sum())
        n_tokens += n_new
    assert n_same >= 0.8 * n_tokens
    return f"{n_same} of {n_tokens} tokens are the reference's"
