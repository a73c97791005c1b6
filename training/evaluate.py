"""Measures a finished file: perplexity, recall and samples, with the KV cache in f32, q8_0 and q4_0.

python -m training.evaluate MODEL.gguf --corpora FOLDER [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from motley.bundled.recall import RecallPrompt, make_recall_prompts
from training.corpus import BOOKS, read_books
from training.export import read_model, read_tokenizer
from training.model import KVFilter, Llama
from training.vocabulary import BOS_ID

WINDOW = 2048  # tokens of context for perplexity, the first of them BOS


def hadamard(n: int) -> Tensor:
    """Orthonormal, symmetric, (n, n)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix / math.sqrt(n)


def q8_0(x: Tensor) -> Tensor:
    """Packed and unpacked again: blocks of 32, one half-precision scale each."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    quants = torch.round(blocks / scale.clamp_min(1e-30))
    return (quants * scale.half().float()).flatten(-2)


def q4_0(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 32))
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # with its sign: it becomes -8
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / -8)
    quants = (torch.floor(blocks / scale + 8.5)).clamp(0, 15) - 8
    return (quants * scale.half().float()).flatten(-2)


def cache_filter(pack: Callable[[Tensor], Tensor], *, rotated: bool) -> KVFilter:
    def store(x: Tensor) -> Tensor:
        if not rotated:
            return pack(x)
        turn = hadamard(x.shape[-1]).to(x)
        return pack(x @ turn) @ turn

    return lambda k, v: (store(k), store(v))


CACHES: dict[str, KVFilter | None] = {
    "f32": None,
    "q8_0 rotated": cache_filter(q8_0, rotated=True),
    "q8_0": cache_filter(q8_0, rotated=False),
    "q4_0 rotated": cache_filter(q4_0, rotated=True),
    "q4_0": cache_filter(q4_0, rotated=False),
}


def windows(ids: list[int]) -> list[list[int]]:
    """Without overlap, BOS in front of each."""
    return [[BOS_ID, *ids[i : i + WINDOW - 1]] for i in range(0, len(ids), WINDOW - 1)]


@torch.inference_mode()
def negative_log_likelihood(model: Llama, ids: list[int]) -> tuple[float, int]:
    """Summed over all tokens (nats), and their number."""
    total, count = 0.0, 0
    device = model.token_embd.weight.device
    for window in windows(ids):
        row = torch.tensor([window], device=device)
        total += F.cross_entropy(model(row[:, :-1])[0].float(), row[0, 1:], reduction="sum").item()
        count += len(window) - 1
    return total, count


@torch.inference_mode()
def recall(model: Llama, tokenizer: Tokenizer, prompts: list[RecallPrompt]) -> list[bool]:
    """Whether greedy decoding gives each whole answer and its full stop.

    One forward pass over prompt and answer tells: greedy decoding gives the answer if each of its tokens is
    the most likely one after those before it.
    """
    device = model.token_embd.weight.device
    results = []
    for prompt in prompts:
        answer = tokenizer.encode(f" {prompt.answer}.").ids
        row = torch.tensor([[*prompt.tokens, *answer]], device=device)
        hidden = model.hidden(row[:, :-1])[0, -len(answer) :]
        best = F.linear(hidden, model.token_embd.weight).argmax(-1)
        results.append(best.tolist() == answer)
    return results


@torch.inference_mode()
def sample(
    model: Llama, tokenizer: Tokenizer, prompt: str, n: int, *, temperature: float = 0.7, seed: int = 0
) -> str:
    device = model.token_embd.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    row = torch.tensor([[BOS_ID, *tokenizer.encode(prompt).ids]], device=device)
    for _ in range(n):
        probabilities = (model(row)[0, -1].float() / temperature).softmax(-1)
        row = torch.cat((row, torch.multinomial(probabilities, 1, generator=generator)[None]), 1)
    return tokenizer.decode(row[0].tolist())


def with_bos(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: [BOS_ID, *tokenizer.encode(text).ids]


def measure(path: Path, corpora: Path, n_prompts: int, device: str) -> dict[str, object]:
    tokenizer = read_tokenizer(path)
    held_out = read_books(corpora).held_out
    text = "\n\n".join(held_out)
    ids = [tokenizer.encode(book).ids for book in held_out]
    report: dict[str, object] = {"held_out_tokens": sum(map(len, ids)), "held_out_bytes": len(text.encode())}
    model = read_model(path).to(device)
    for book, book_ids in zip(BOOKS, ids, strict=True):
        total, count = negative_log_likelihood(model, book_ids)
        report[f"perplexity {book.file}"] = math.exp(total / count)
    prompts = {
        length: make_recall_prompts(with_bos(tokenizer), text, n_prompts, length, seed=length)
        for length in (500, 1000, 2000, 4000)
    }
    for name, kv_filter in CACHES.items():
        model = read_model(path, kv_filter).to(device)
        parts = [negative_log_likelihood(model, book_ids) for book_ids in ids]
        report[f"perplexity, cache {name}"] = math.exp(sum(p[0] for p in parts) / sum(p[1] for p in parts))
        for length, group in prompts.items():
            hits = recall(model, tokenizer, group)
            report[f"recall at {length}, cache {name}"] = sum(hits) / len(hits)
    model = read_model(path).to(device)
    for prompt in ("Once upon a time", "The captain looked at the sea and said,", "KING RICHARD:\n"):
        report[f"sample {prompt!r}"] = sample(model, tokenizer, prompt, 100)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=200, help="recall prompts for each length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = measure(args.model, args.corpora, args.prompts, args.device)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
