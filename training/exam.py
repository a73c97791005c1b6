"""What is measured: held-out items of every skill, and how many of them a model gets right.

All items are drawn with names, values, schemas and tools that training never used (`Draw(held_out=True)`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from training.chat import Task, render
from training.lexicon import Draw
from training.model import Model
from training.skills import facts, fields, numbers, smalltalk, telling, tools, words
from training.stories import has_loop
from training.vocabulary import BOS_ID, IM_END, IM_END_ID

SKILLS: dict[str, Callable[[Draw], Task]] = {
    "json": fields.extraction,
    "tool call": tools.call,
    "tool result": tools.use,
    "no tool": tools.no_tool,
    "context": facts.context,
    "secrets": facts.secrets,
    "sums": numbers.sums,
    "comparisons": numbers.comparisons,
    "spelling": words.spelling,
    "reversing": words.reversing,
    "sorting": words.sorting,
    "counting": words.counting,
    "repeating": words.repeating,
    "identity": smalltalk.named_self,
    "unknown": smalltalk.unknowable,
    "memory": lambda draw: _joined(smalltalk.introduction(draw)),
}
STORY_TOKENS = 400  # at most; the longest of the generator have about 330


def _joined(tasks: list[Task]) -> Task:
    return Task(tasks[-1].skill, tuple(message for task in tasks for message in task.messages))


def make_tasks(skill: str, n: int, seed: int = 1) -> list[Task]:
    """`n` held-out items; the same arguments give the same items."""
    draw = Draw(random.Random(f"{skill} {seed}"), held_out=True)
    make = telling.tell if skill == telling.STORY else SKILLS[skill]
    return [make(draw) for _ in range(n)]


@dataclass(frozen=True)
class Item:
    """Token ids of a question, and of the one answer that counts."""

    question: list[int]
    answer: list[int]


def make_items(tokenizer: Tokenizer, tasks: Iterable[Task]) -> list[Item]:
    return [
        Item(
            [BOS_ID, *tokenizer.encode(render(task.prompt(), task.tools)).ids],
            tokenizer.encode(task.answer + IM_END).ids,
        )
        for task in tasks
    ]


@dataclass(frozen=True)
class Answers:
    """For each item, the most likely token at each place of the answer: of all layers, and of the early exit."""

    full: list[list[int]]
    early: list[list[int]]


@torch.inference_mode()
def most_likely(
    model: Model, items: list[Item], *, dtype: torch.dtype = torch.float32, tokens: int = 65_536
) -> Answers:
    """One forward pass over question and answer: greedy decoding gives an answer if each of its tokens is the most
    likely one after those before it.
    """
    device = model.token_embd.weight.device
    order = sorted(range(len(items)), key=lambda i: len(items[i].question) + len(items[i].answer))
    full: list[list[int]] = [[] for _ in items]
    early: list[list[int]] = [[] for _ in items]
    while order:
        longest = len(items[order[-1]].question) + len(items[order[-1]].answer)
        n = max(1, tokens // longest)
        batch, order = order[-n:], order[:-n]
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, i in enumerate(batch):
            both = items[i].question + items[i].answer
            ids[row, : len(both)] = torch.tensor(both)
        last, exit_, _ = model.hidden(ids.to(device), dtype=dtype)
        output = model.token_embd.weight.to(dtype)
        for hidden, found in ((last, full), (exit_, early)):
            grid = hidden.to(dtype).unflatten(0, ids.shape)
            for row, i in enumerate(batch):
                start = len(items[i].question) - 1
                logits = F.linear(grid[row, start : start + len(items[i].answer)], output)
                found[i] = logits.argmax(-1).tolist()
    return Answers(full, early)


def share_right(items: list[Item], answers: list[list[int]]) -> float:
    return sum(item.answer == answer for item, answer in zip(items, answers, strict=True)) / len(items)


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Of all tokens, the share on which two models agree."""
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


@torch.inference_mode()
def continue_greedily(
    model: Model, prompts: list[list[int]], n: int, *, dtype: torch.dtype = torch.float32
) -> list[list[int]]:
    """Up to `n` tokens after each prompt, ended by <|im_end|>. Without a cache: for short texts."""
    device = model.token_embd.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids = torch.zeros((len(prompts), max(map(len, prompts)) + n), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids = ids.to(device)
    rows = torch.arange(len(prompts), device=device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(n):
        width = min(ids.shape[1], (int(lengths.max()) + 63) // 64 * 64)
        hidden = model.hidden(ids[:, :width], dtype=dtype)[0].unflatten(0, (len(prompts), width))
        best = F.linear(hidden[rows, lengths - 1].to(dtype), model.token_embd.weight.to(dtype)).argmax(-1)
        ids[rows, lengths] = best
        is_done |= best == IM_END_ID
        lengths += 1
        if step % 16 == 15 and bool(is_done.all()):
            break
    found = [ids[row, len(prompt) : int(lengths[row])].tolist() for row, prompt in enumerate(prompts)]
    return [tokens[: tokens.index(IM_END_ID)] if IM_END_ID in tokens else tokens for tokens in found]


def sit(
    model: Model, tokenizer: Tokenizer, items: dict[str, list[Item]], *, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """The share of right answers for each skill, and how often the early exit agrees."""
    marks: dict[str, float] = {}
    full: list[list[int]] = []
    early: list[list[int]] = []
    for skill, group in items.items():
        answers = most_likely(model, group, dtype=dtype)
        marks[skill] = share_right(group, answers.full)
        full, early = full + answers.full, early + answers.early
    marks["exit agrees"] = agreement(full, early)
    return marks


def tell_stories(
    model: Model, tokenizer: Tokenizer, n: int, *, dtype: torch.dtype = torch.float32
) -> tuple[float, float, list[str]]:
    """The share of consistent stories, the share without loops, and the stories, each with what is wrong with it."""
    tasks = make_tasks(telling.STORY, n)
    prompts = [[BOS_ID, *tokenizer.encode(render(task.prompt())).ids] for task in tasks]
    told = continue_greedily(model, prompts, STORY_TOKENS, dtype=dtype)
    texts = [tokenizer.decode(tokens) for tokens in told]
    right = [task.is_right(text) for task, text in zip(tasks, texts, strict=True)]
    is_calm = [not has_loop(tokens) for tokens in told]
    shown = [
        f"[{'ok' if good else 'WRONG'}] {task.messages[0]['content']}\n{text}"
        for task, text, good in zip(tasks, texts, right, strict=True)
    ]
    return sum(right) / n, sum(is_calm) / n, shown
