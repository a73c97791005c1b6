"""Writes trained weights as a Q8_0 GGUF file, and reads such a file back into the training model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

import gguf
from training.chat import TEMPLATE
from training.model import Config, KVFilter, Model
from training.vocabulary import BOS_ID, CONTROL, IM_END_ID, MARKS, PAD_ID, PRE, make_tokenizer

NAMES = {"main": "Motley 15M", "draft": "Motley Draft 1M", "experts": "Motley Experts 9M"}
DESCRIPTION = "Small stories, small tasks, tool calls and look-up in its context. See MODEL_CARD.md."


def write_gguf(path: Path, model: Model, tokenizer: Tokenizer, name: str) -> None:
    """Matrices as Q8_0, norms and routers as F32. Names and RoPE's pairs are GGUF's already."""
    writer = gguf.GGUFWriter(path, model.config.architecture)
    _add_metadata(writer, model.config, name)
    _add_tokenizer(writer, tokenizer)
    for key, weight in model.state_dict().items():
        values = weight.detach().float().cpu().numpy()
        if values.ndim == 1 or "ffn_gate_inp" in key:
            writer.add_tensor(key, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(key, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: Config, name: str) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_description(DESCRIPTION)
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.n_vocab)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    if config.n_expert:
        writer.add_expert_count(config.n_expert)
        writer.add_expert_used_count(config.n_expert_used)
        writer.add_expert_feed_forward_length(config.n_ff)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    kinds = dict.fromkeys(CONTROL, gguf.TokenType.CONTROL) | dict.fromkeys(MARKS, gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_eot_token_id(IM_END_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(TEMPLATE)


def read_model(path: Path, kv_filter: KVFilter | None = None) -> Model:
    """The model as the file has it: weights unpacked from Q8_0 to float32."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def field(key: str, default: int | None = None) -> int:
        full = f"{architecture}.{key}"
        return (
            default if default is not None and full not in reader.fields else reader.fields[full].contents()
        )

    config = Config(
        architecture=architecture,
        n_vocab=field("vocab_size"),
        n_layer=field("block_count"),
        n_embd=field("embedding_length"),
        n_head=field("attention.head_count"),
        n_head_kv=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        n_ff=field("feed_forward_length"),
        n_expert=field("expert_count", 0),
        n_expert_used=field("expert_used_count", 0),
        n_ctx=field("context_length"),
        rope_base=field("rope.freq_base"),
        rms_eps=field("attention.layer_norm_rms_epsilon"),
    )
    model = Model(config, kv_filter)
    weights = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    model.load_state_dict(weights)
    return model.eval()


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer as the file has it."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    return make_tokenizer({token: i for i, token in enumerate(tokens)}, merges)
