"""Trains the bundled model and its two siblings, and writes them as GGUF.

    python -m training.train --prepared FOLDER --work FOLDER --out FOLDER [--total-seconds 780] [--stop-after 560]

Length of passages and learning rate follow the clock (all calls together take --total-seconds), so that training ends
in time on any machine. A call that is stopped leaves a checkpoint under --work, and the next call goes on from it; with
--start-from it goes on from finished files instead.
The three models read the same batches. The draft model also learns to predict what the main model predicts, and so does
the main model's exit after half of its layers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training import exam
from training.data import Feed
from training.drills import ANSWER, TEXT
from training.export import NAMES, read_model, read_tokenizer, write_gguf
from training.mixture import Shares
from training.model import CONFIGS, TINY, Config, Model, compile_steps
from training.optimizer import Optimizer
from training.vocabulary import load_tokenizer

STARTED = time.monotonic()


@dataclass(frozen=True)
class Recipe:
    total_seconds: float = 780.0
    stop_after: float = 560.0  # seconds of this call, preparation included
    seed: int = 1
    tokens: int = 131_072  # of one step
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    length_until: tuple[float, ...] = (0.7, 0.85, 1.0)  # share of the time after which each length ends
    siblings_every: int = 2  # steps of the main model for each step of its siblings
    text_weight: float = 1.0  # stories and books against answers
    exit_weight: float = 0.3
    soft_share: float = 0.5  # of the draft model's loss: what the main model predicts, against the text
    balance_weight: float = 0.01
    kv_noise: float = 0.15  # at most, on keys and values, against their own size; q4_0 makes about 0.09
    muon_rate: float = 0.012
    adam_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    decay_from: float = 0.35
    exam_every: float = 100.0  # seconds
    save_every: float = 120.0


def main_loss(
    last: Tensor, early: Tensor, output: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    """The loss of the text, the loss of the early exit against what all layers predict, and these predictions."""
    output = output.to(DTYPE)
    logits = F.linear(last.to(DTYPE), output).float()
    log_chances = logits.log_softmax(-1)
    hard = -log_chances.gather(-1, targets[:, None])[:, 0]
    early_chances = F.linear(early.to(DTYPE), output).float().log_softmax(-1)
    soft = -(log_chances.detach().exp() * early_chances).sum(-1)
    return (hard * weights).sum(), (soft * weights).sum(), logits.detach().to(DTYPE)


def sibling_loss(
    last: Tensor, output: Tensor, targets: Tensor, weights: Tensor, teacher: Tensor, soft_share: float
) -> tuple[Tensor, Tensor]:
    """The loss of the text, and the mixture of it with the loss against the main model's predictions."""
    log_chances = F.linear(last.to(DTYPE), output.to(DTYPE)).float().log_softmax(-1)
    hard = (-log_chances.gather(-1, targets[:, None])[:, 0] * weights).sum()
    if soft_share == 0:
        return hard, hard
    soft = (-(teacher.float().softmax(-1) * log_chances).sum(-1) * weights).sum()
    return hard, (1 - soft_share) * hard + soft_share * soft


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Trainer:
    def __init__(
        self, configs: dict[str, Config], recipe: Recipe, tokenizer: Tokenizer, *, is_eager: bool = False
    ) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        torch.manual_seed(recipe.seed)
        self.models = {name: Model(config).to(DEVICE) for name, config in configs.items()}
        rates = {
            "muon_rate": recipe.muon_rate,
            "adam_rate": recipe.adam_rate,
            "weight_decay": recipe.weight_decay,
        }
        self.optimizers = {name: Optimizer(model, **rates) for name, model in self.models.items()}
        self.main_loss, self.sibling_loss = main_loss, sibling_loss
        self.is_compiled = DEVICE == "cuda" and not is_eager
        if self.is_compiled:
            torch._dynamo.config.recompile_limit = 64
            compile_steps()
            self.main_loss = torch.compile(main_loss, dynamic=False)
            self.sibling_loss = torch.compile(sibling_loss, dynamic=False)
        self.step = self.tokens = self.calls = 0
        self.seconds_before = 0.0  # of earlier calls

    @property
    def progress(self) -> float:
        """From 0 to 1, by the clock."""
        return (self.seconds_before + time.monotonic() - STARTED) / self.recipe.total_seconds

    def length(self, progress: float) -> int:
        r = self.recipe
        return next(
            (n for n, end in zip(r.lengths, r.length_until, strict=True) if progress < end), r.lengths[-1]
        )

    def learning_rate(self, progress: float) -> float:
        warmup = min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        return warmup * min(1.0, max(0.0, (1 - progress) / (1 - self.recipe.decay_from)))

    def learn(self, ids: Tensor, kinds: Tensor, factor: float) -> Tensor:
        """One step of the main model, and every few steps one of the others. Returns losses."""
        r = self.recipe
        ids = ids.to(DEVICE, non_blocking=True).long()
        kinds = kinds[:, 1:].to(DEVICE, non_blocking=True).flatten()
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].flatten()
        is_text, is_answer = kinds == TEXT, kinds == ANSWER
        weights = is_text * (
            r.text_weight / is_text.sum().clamp_min(1)
        ) + is_answer / is_answer.sum().clamp_min(1)
        noise = torch.rand((), device=DEVICE) * r.kv_noise
        losses = torch.zeros(4, device=DEVICE)
        main = self.models["main"]
        last, early, _ = main.hidden(inputs, noise=noise, dtype=DTYPE, compiled=self.is_compiled)
        hard, soft, teacher = self.main_loss(last, early, main.token_embd.weight, targets, weights)
        (hard + r.exit_weight * soft).backward()
        losses[0], losses[1] = hard.detach(), soft.detach()
        self.update("main", factor)
        if self.step % r.siblings_every == 0:
            for i, name in enumerate(("draft", "experts"), 2):
                model = self.models[name]
                last, _, uneven = model.hidden(inputs, noise=noise, dtype=DTYPE, compiled=self.is_compiled)
                soft_share = r.soft_share if name == "draft" else 0.0
                hard, loss = self.sibling_loss(
                    last, model.token_embd.weight, targets, weights, teacher, soft_share
                )
                (loss + r.balance_weight * uneven).backward()
                losses[i] = hard.detach()
                self.update(name, factor)
        self.step += 1
        self.tokens += targets.numel()
        return losses

    def update(self, name: str, factor: float) -> None:
        nn.utils.clip_grad_norm_(self.models[name].parameters(), 1.0)
        self.optimizers[name].step(factor)
        self.models[name].zero_grad(set_to_none=True)

    def save(self, path: Path) -> None:
        state: dict[str, Any] = {
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "counts": (self.step, self.tokens, self.calls + 1),
            "seconds": self.seconds_before + time.monotonic() - STARTED,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=DEVICE)
        for name, model in self.models.items():
            model.load_state_dict(state["models"][name])
            self.optimizers[name].load_state_dict(state["optimizers"][name])
        self.step, self.tokens, self.calls = state["counts"]
        self.seconds_before = state["seconds"]

    def start_from(self, folder: Path) -> None:
        """Weights of finished files; the optimizers start anew."""
        for name, model in self.models.items():
            path = folder / f"{name}.gguf"
            if read_tokenizer(path).get_vocab() != self.tokenizer.get_vocab():
                sys.exit(f"{path}: another vocabulary. Prepare with `--vocabulary {path}`.")
            model.load_state_dict(read_model(path).state_dict())

    def export(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        for name, model in self.models.items():
            write_gguf(out / f"{name}.gguf", model, self.tokenizer, NAMES[name])


class Examiner:
    """Held-out items, and the recall prompts that `training.prepare` made."""

    def __init__(self, tokenizer: Tokenizer, prepared: Path, n: int) -> None:
        self.tokenizer = tokenizer
        self.items = {skill: exam.make_items(tokenizer, exam.make_tasks(skill, n)) for skill in exam.SKILLS}
        recall = json.loads((prepared / "recall.json").read_text())
        self.items |= {
            f"recall {length}": [exam.Item(question, answer) for question, answer in pairs[:n]]
            for length, pairs in recall.items()
        }

    def sit(self, models: dict[str, Model], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        marks = {name: exam.sit(models[name], self.tokenizer, self.items, dtype=DTYPE) for name in names}
        if "draft" in names:
            items = [item for group in self.items.values() for item in group]
            answers = [exam.most_likely(models[name], items, dtype=DTYPE).full for name in ("main", "draft")]
            marks["draft"]["agrees with main"] = exam.agreement(*answers)
        return {name: {key: round(value, 3) for key, value in row.items()} for name, row in marks.items()}


def log(**values: object) -> None:
    print(json.dumps({"s": round(time.monotonic() - STARTED, 1), **values}), flush=True)


def run(trainer: Trainer, feed: Feed, examiner: Examiner, args: argparse.Namespace) -> None:
    recipe = trainer.recipe
    checkpoint = args.work / "checkpoint.pt"
    next_exam, next_save = recipe.exam_every, recipe.save_every
    shown, shown_at = trainer.tokens, time.monotonic()
    while (progress := trainer.progress) < 1 and time.monotonic() - STARTED < recipe.stop_after:
        length = trainer.length(progress)
        losses = trainer.learn(*feed.take(length), trainer.learning_rate(progress))
        if trainer.step % 50 == 0 or trainer.step in (1, 2, 5, 10, 20):
            values = [round(value, 4) for value in losses.tolist()]  # waits for the device
            speed = (trainer.tokens - shown) / (time.monotonic() - shown_at) / 1e6
            shown, shown_at = trainer.tokens, time.monotonic()
            log(step=trainer.step, Mtok=round(trainer.tokens / 1e6, 1), Mtok_s=round(speed, 3), length=length,
                loss=values, progress=round(progress, 3), repeated=feed.n_repeated, fresh=feed.n_fresh)  # fmt: skip
        elif trainer.step % 4 == 0 and DEVICE == "cuda":
            torch.cuda.synchronize()  # so that the clock is the device's
        if time.monotonic() - STARTED > next_save:
            trainer.save(checkpoint)
            trainer.export(args.out)
            next_save = time.monotonic() - STARTED + recipe.save_every
        if time.monotonic() - STARTED > next_exam:
            log(exam=examiner.sit(trainer.models, ("main",)))
            next_exam = time.monotonic() - STARTED + recipe.exam_every
    trainer.save(checkpoint)
    trainer.export(args.out)
    log(done=trainer.step, tokens=trainer.tokens, progress=round(trainer.progress, 3))


def parse_tuple(item: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(map(item, text.split(",")))


def parse_arguments() -> tuple[argparse.Namespace, Recipe]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepared", type=Path, required=True, help="the folder that training.prepare made")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="where the GGUF files are written")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--tiny", action="store_true", help="toy models, to see everything work on a CPU")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--start-from", type=Path, help="a folder of GGUF files to train on from")
    parser.add_argument(
        "--exam-items", type=int, default=50, help="held-out items of each skill, while training"
    )
    parser.add_argument("--final-items", type=int, default=200, help="the same at the end")
    parser.add_argument("--shares", default="", help="other shares of the mixture, as json=0.2,sums=0.1")
    for field in fields(Recipe):
        kind: Any = type(field.default)
        if isinstance(field.default, tuple):
            kind = partial(parse_tuple, type(field.default[0]))
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    args = parser.parse_args()
    recipe = Recipe(**{f.name: getattr(args, f.name) for f in fields(Recipe)})
    if args.tiny:
        recipe = replace(recipe, lengths=(512, 1024, 2048), tokens=min(recipe.tokens, 32_768))
    return args, recipe


def main() -> None:
    args, recipe = parse_arguments()
    torch.set_float32_matmul_precision("high")
    checkpoint = args.work / "checkpoint.pt"
    calls = torch.load(checkpoint, map_location="cpu", mmap=True)["counts"][2] if checkpoint.exists() else 0
    changed = {
        name: float(value) for name, value in (pair.split("=") for pair in args.shares.split(",") if pair)
    }
    shares = replace(Shares(), **changed)
    # Workers are forked before the device is touched; the seed differs from call to call.
    feed = Feed(args.prepared, shares, (recipe.seed, calls), recipe.lengths[0], recipe.tokens, args.workers)
    tokenizer = load_tokenizer(args.prepared / "tokenizer.json")
    trainer = Trainer(TINY if args.tiny else CONFIGS, recipe, tokenizer, is_eager=args.eager)
    if checkpoint.exists():
        trainer.load(checkpoint)
    elif args.start_from:
        trainer.start_from(args.start_from)
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in trainer.models.items()}
    log(parameters=sizes, recipe=repr(recipe), shares=repr(shares), device=DEVICE)
    examiner = Examiner(tokenizer, args.prepared, args.exam_items)
    run(trainer, feed, examiner, args)
    if args.final_items:
        final = Examiner(tokenizer, args.prepared, args.final_items)
        log(final=final.sit(trainer.models, ("main", "draft", "experts")))
        consistent, calm, stories = exam.tell_stories(
            trainer.models["main"], tokenizer, min(100, args.final_items), dtype=DTYPE
        )
        log(stories=consistent, without_loops=calm)
        (args.out / "stories.txt").write_text("\n\n=====\n".join(stories), encoding="utf-8")
    if DEVICE == "cuda":
        log(memory_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))


if __name__ == "__main__":
    main()
