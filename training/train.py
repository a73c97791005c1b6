"""Trains the bundled model and writes it as GGUF.

    python -m training.train --corpora FOLDER --out FOLDER [--minutes 6.6]

The schedule follows the clock, so that a run ends in time on any machine: short passages first, because
looking things up is learned faster there, then long ones; the learning rate falls to zero over the last part.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from multiprocessing import Value
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from motley.bundled.recall import RecallPrompt, make_recall_prompts
from training.corpus import read_books
from training.drills import ANSWER, TEXT, Batches
from training.evaluate import negative_log_likelihood, recall, sample, with_bos
from training.export import write_gguf
from training.model import Config, Llama
from training.vocabulary import train_tokenizer

TINY = Config(n_layer=3, n_embd=128, n_head=4, n_head_kv=2, head_dim=32, n_ff=256, n_ctx=2048)


@dataclass(frozen=True)
class Recipe:
    minutes: float = 6.6
    seed: int = 1
    tokens_per_step: int = 32_768
    lengths: tuple[int, ...] = (512, 2048, 4096)
    length_until: tuple[float, ...] = (0.2, 0.6, 1.0)  # share of the time after which each length ends
    text_share: float = 0.4  # of the sequences; the others are drills
    answer_weight: float = 1.0  # the loss of an answer's token against that of a text's
    dropout: float = 0.1
    kv_noise: float = 0.15  # at most, on keys and values, against their own size; q4_0 makes about 0.09
    learning_rate: float = 2e-3
    weight_decay: float = 1.5  # much, because the books are read some forty times
    warmup_steps: int = 200
    decay_from: float = 0.4
    average: float = 0.997  # moving average of the weights: what is evaluated and kept
    wanted_recall: float = 0.99
    evaluate_every_s: float = 25.0


class KVNoise(nn.Module):
    """Noise like that of a 4-bit cache, so that attention learns to do without the last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()), persistent=False)

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.blur(k), self.blur(v)

    def blur(self, x: Tensor) -> Tensor:
        size = x.detach().float().square().mean(-1, keepdim=True).sqrt()
        return x + (self.level * size * torch.randn_like(x)).to(x.dtype)


@dataclass(frozen=True)
class Exam:
    """What is asked of the model while it trains: the held-out ends of the books, and secrets in them."""

    tokenizer: Tokenizer
    books: list[list[int]]
    prompts: dict[int, list[RecallPrompt]]

    @staticmethod
    def make(tokenizer: Tokenizer, held_out: list[str], lengths: list[int], n_prompts: int) -> Exam:
        text = "\n\n".join(held_out)
        prompts = {
            n: make_recall_prompts(with_bos(tokenizer), text, n_prompts, n, seed=n + 1) for n in lengths
        }
        return Exam(tokenizer, [tokenizer.encode(book).ids for book in held_out], prompts)

    def sit(self, model: Llama) -> dict[str, float]:
        with autocast(model.token_embd.weight.device.type):
            parts = [negative_log_likelihood(model, ids) for ids in self.books]
            hits = {n: recall(model, self.tokenizer, group) for n, group in self.prompts.items()}
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        return {"val_loss": loss, **{f"recall_{n}": sum(hit) / len(hit) for n, hit in hits.items()}}


def autocast(device: str) -> torch.autocast | nullcontext[None]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()


def token_losses(hidden: Tensor, output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        F.linear(hidden, output).float().flatten(0, 1), targets.flatten(), reduction="none"
    )


class Trainer:
    def __init__(self, config: Config, recipe: Recipe, batches: Batches, exam: Exam, started: float) -> None:
        self.recipe, self.batches, self.exam, self.started = recipe, batches, exam, started
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(recipe.seed)
        self.noise = KVNoise()
        self.model = Llama(replace(config, dropout=recipe.dropout), self.noise).to(self.device)
        self.average = Llama(config).to(self.device).eval()
        self.average.load_state_dict(self.model.state_dict())
        self.token_losses = token_losses
        if self.device == "cuda":
            for block in self.model.blk:
                block.compile(dynamic=False)
            self.token_losses = torch.compile(token_losses, dynamic=False)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        norms = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=self.device == "cuda")
        self.best: dict[str, Tensor] = {}
        self.best_score = math.inf
        self.step = self.tokens = 0

    @property
    def progress(self) -> float:
        """From 0 to 1, by the clock."""
        return (time.monotonic() - self.started) / (60 * self.recipe.minutes)

    def learning_rate(self, progress: float) -> float:
        r = self.recipe
        warmup = min(1.0, (self.step + 1) / r.warmup_steps)
        decay = min(1.0, max(0.0, (1 - progress) / (1 - r.decay_from)))
        return r.learning_rate * warmup * decay

    def learn(self, ids: Tensor, kinds: Tensor, progress: float) -> Tensor:
        """One step. Returns the mean losses of text and of answers."""
        ids = ids.to(self.device, non_blocking=True).long()
        kinds = kinds[:, 1:].to(self.device, non_blocking=True).flatten()
        self.noise.level.uniform_(0, self.recipe.kv_noise)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress)
        with autocast(self.device):
            hidden = self.model.hidden(ids[:, :-1])
            losses = self.token_losses(hidden, self.model.token_embd.weight, ids[:, 1:])
        is_text, is_answer = kinds == TEXT, kinds == ANSWER
        text = (losses * is_text).sum() / is_text.sum()
        answer = (losses * is_answer).sum() / is_answer.sum()
        (text + self.recipe.answer_weight * answer).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # A short memory at first, or the start would linger.
        keep = min(self.recipe.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - keep)
        self.step += 1
        self.tokens += ids.numel()
        return torch.stack((text.detach(), answer.detach()))

    def evaluate(self, losses: Tensor) -> None:
        marks = self.exam.sit(self.average)
        hardest = min(value for key, value in marks.items() if key.startswith("recall"))
        score = marks["val_loss"] + 5 * max(0.0, self.recipe.wanted_recall - hardest)
        if score < self.best_score:
            self.best_score = score
            self.best = copy.deepcopy(self.average.state_dict())
        line = {"s": time.monotonic() - self.started, "step": self.step, "Mtok": self.tokens / 1e6}
        line |= {
            "length": self.batches.length.value,
            "text": losses[0].item(),
            "answer": losses[1].item(),
            **marks,
        }
        print(json.dumps({key: round(value, 4) for key, value in line.items()}), flush=True)

    def run(self, workers: int) -> Llama:
        r = self.recipe
        loader = iter(
            DataLoader(self.batches, batch_size=None, num_workers=workers, pin_memory=self.device == "cuda")
        )
        next_evaluation = r.evaluate_every_s
        while (progress := self.progress) < 1:
            length = next(n for n, until in zip(r.lengths, r.length_until, strict=True) if progress < until)
            self.batches.length.value = length
            losses = self.learn(*next(loader), progress)
            if time.monotonic() - self.started > next_evaluation:
                self.evaluate(losses)
                next_evaluation = time.monotonic() - self.started + r.evaluate_every_s
        self.evaluate(losses)
        self.average.load_state_dict(self.best)
        return self.average


def parse_arguments() -> tuple[argparse.Namespace, Recipe]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpora", type=Path, required=True, help="the folder of the books")
    parser.add_argument("--out", type=Path, required=True, help="where model.gguf is written")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--tiny", action="store_true", help="a toy model, to see everything work on a CPU")
    for field in fields(Recipe):
        if not isinstance(field.default, tuple):
            name = f"--{field.name.replace('_', '-')}"
            parser.add_argument(name, type=type(field.default), default=field.default)
    args = parser.parse_args()
    recipe = Recipe(**{f.name: getattr(args, f.name) for f in fields(Recipe) if hasattr(args, f.name)})
    if args.tiny:
        recipe = replace(recipe, lengths=(128, 256, 384), tokens_per_step=4096)
    return args, recipe


def main() -> None:
    started = time.monotonic()
    args, recipe = parse_arguments()
    config = TINY if args.tiny else Config()
    torch.set_float32_matmul_precision("high")

    splits = (read_books(args.corpora), read_books(args.corpora, as_printed=True))
    tokenizer = train_tokenizer(chapter for split in splits for book in split.train for chapter in book)
    if args.tiny:
        exam = Exam.make(tokenizer, [book[:5000] for book in splits[0].held_out], [250], n_prompts=32)
    else:
        exam = Exam.make(tokenizer, splits[0].held_out, [500, 1000, 2000, 4000], n_prompts=64)
    length = Value("i", recipe.lengths[0])
    batches = Batches(
        tokenizer, splits, length, tokens=recipe.tokens_per_step, text=recipe.text_share, seed=recipe.seed
    )
    print(f"ready after {time.monotonic() - started:.0f} s; {len(batches.books)} tokens of text; {recipe}")
    trainer = Trainer(config, recipe, batches, exam, started)
    model = trainer.run(args.workers)

    args.out.mkdir(parents=True, exist_ok=True)
    write_gguf(args.out / "model.gguf", model, tokenizer)
    seconds = time.monotonic() - started
    print(f"{trainer.step} steps, {trainer.tokens / 1e6:.0f} M tokens in {seconds:.0f} s; {config}")
    for prompt in ("Once upon a time", "The captain", "KING RICHARD:\n"):
        print("---", sample(model, tokenizer, prompt, 80), flush=True)


if __name__ == "__main__":
    main()
