"""A byte-level BPE vocabulary of 4096 tokens, learned from the books. All bytes are tokens: any text fits."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

N_VOCAB = 4096
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL = (BOS, EOS, PAD)  # ids 0, 1, 2
BOS_ID, EOS_ID, PAD_ID = range(3)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # The regular expression of GPT-2, as "tokenizer.ggml.pre" = "gpt-2" says in the file.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == N_VOCAB
    assert tokenizer.encode("".join(SPECIAL)).ids == [BOS_ID, EOS_ID, PAD_ID]
    return tokenizer
