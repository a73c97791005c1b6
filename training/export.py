"""Writes the trained weights as a Q8_0 GGUF file, and reads such a file back into the training model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import gguf
from training.model import Config, KVFilter, Llama
from training.vocabulary import BOS_ID, EOS_ID, PAD_ID, SPECIAL

NAME = "Motley 10M"
DESCRIPTION = (
    "Writes English in the manner of six old books and looks up secrets in its context. See MODEL_CARD.md."
)


def write_gguf(path: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Matrices as Q8_0, norms as F32. Names and order of the pairs in RoPE are GGUF's already."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, model.config)
    _add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        values = weight.detach().float().cpu().numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_type("model")
    writer.add_name(NAME)
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


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def read_model(path: Path, kv_filter: KVFilter | None = None) -> Llama:
    """The model as the file has it: weights unpacked from Q8_0 to float32."""
    reader = gguf.GGUFReader(path)

    def field(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    config = Config(
        n_vocab=field("vocab_size"),
        n_layer=field("block_count"),
        n_embd=field("embedding_length"),
        n_head=field("attention.head_count"),
        n_head_kv=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        n_ff=field("feed_forward_length"),
        n_ctx=field("context_length"),
        rope_base=field("rope.freq_base"),
        rms_eps=field("attention.layer_norm_rms_epsilon"),
    )
    model = Llama(config, kv_filter)
    weights = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    model.load_state_dict(weights)
    return model.eval()


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer as the file has it."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
