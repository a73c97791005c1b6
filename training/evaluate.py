"""Measures finished files through the engine: what a user gets, greedy, on held-out items.

    python -m training.evaluate skills MODEL.gguf [-n 200] [--seed 2] [--skills "json,tool call"]
    python -m training.evaluate stories MODEL.gguf [-n 100]
    python -m training.evaluate agreement MODEL.gguf [--draft DRAFT.gguf] [-n 20]
    python -m training.evaluate texts FOLDER [--corpora FOLDER]

`texts` writes what `motley kv-quality -f` and `motley perplexity -f` read: held-out stories, and with --corpora the
held-out ends of the books. Seed 1 was looked at while the recipe was tuned; the card's figures use seed 2.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motley import LLM
from training.chat import Task
from training.corpus import read_books
from training.exam import SKILLS, STORY_TOKENS, make_tasks
from training.lexicon import Draw
from training.plots import write_story
from training.skills.telling import STORY
from training.stories import has_loop

FRESH_SEED = 2
N_PARALLEL = 16
AGREEMENT_SKILLS = (*SKILLS, STORY)


def prompt_ids(llm: LLM, task: Task) -> list[int]:
    """The question as the file's own chat template writes it."""
    pieces = llm.chat_template.render_marked(task.prompt(), tools=list(task.tools) or None)
    return list(llm.tokenizer.encode_marked(pieces))


def answer(llm: LLM, tasks: Sequence[Task], max_tokens: int = STORY_TOKENS, **options: Any) -> list[str]:
    """What the model says, greedy; all tasks are one batch."""
    prompts = [prompt_ids(llm, task) for task in tasks]
    return [c.text for c in llm.generate(prompts, temperature=0, max_tokens=max_tokens, **options)]


def wrong_answers(llm: LLM, tasks: Sequence[Task], **options: Any) -> list[tuple[Task, str]]:
    pairs = zip(tasks, answer(llm, tasks, **options), strict=True)
    return [(task, text) for task, text in pairs if not task.is_right(text)]


def has_word_loop(text: str) -> bool:
    """Whether four words in a row occur three times within 120 words.

    Words, not tokens: in this vocabulary the pieces of one invented name alone are a 4-gram, and a hero who is named
    three times is no loop.
    """
    return has_loop(re.findall(r"\w+", text.lower()))


def measure_skills(llm: LLM, skills: Sequence[str], n: int, seed: int) -> dict[str, float]:
    return {skill: 1 - len(wrong_answers(llm, make_tasks(skill, n, seed))) / n for skill in skills}


def measure_stories(llm: LLM, n: int, seed: int) -> dict[str, float]:
    """Shares of consistent stories and of stories without loops, beside what the generator's own stories reach."""
    tasks = make_tasks(STORY, n, seed)
    told, written = answer(llm, tasks), [task.answer for task in tasks]
    return {
        "consistent": sum(task.is_right(text) for task, text in zip(tasks, told, strict=True)) / n,
        "without loops": sum(not has_word_loop(text) for text in told) / n,
        "without loops, the generator's own": sum(not has_word_loop(text) for text in written) / n,
    }


def measure_agreement(llm: LLM, draft: LLM | None, n: int, seed: int, n_layer_exit: int) -> dict[str, float]:
    """Of the tokens that the model itself says (greedy, all skills and stories), the share that the early exit and
    the draft model would have said at the same place.
    """
    n_tokens = n_same_exit = n_same_draft = 0
    for skill in AGREEMENT_SKILLS:
        prompts = [prompt_ids(llm, task) for task in make_tasks(skill, n, seed)]
        for prompt, said in zip(
            prompts, llm.generate(prompts, temperature=0, max_tokens=STORY_TOKENS), strict=True
        ):
            ids, start = [*prompt, *said.tokens][:-1], len(prompt) - 1
            tokens = list(said.tokens)
            n_tokens += len(tokens)
            early = llm.logits(ids, n_layer_exit=n_layer_exit)[start:].argmax(-1).tolist()
            n_same_exit += sum(a == b for a, b in zip(early, tokens, strict=True))
            if draft is not None:
                other = draft.logits(ids)[start:].argmax(-1).tolist()
                n_same_draft += sum(a == b for a, b in zip(other, tokens, strict=True))
    shares = {"tokens": float(n_tokens), f"exit after {n_layer_exit} layers": n_same_exit / n_tokens}
    return shares | ({} if draft is None else {"draft": n_same_draft / n_tokens})


def held_out_stories(n: int, seed: int) -> str:
    """Stories with held-out words, as plain text."""
    draw = Draw(random.Random(f"texts {seed}"), held_out=True)
    return "\n\n".join(write_story(draw).text for _ in range(n))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("skills", "stories", "agreement", "texts"))
    parser.add_argument("path", type=Path)
    parser.add_argument("-n", type=int, default=100, help="items of each skill")
    parser.add_argument("--seed", type=int, default=FRESH_SEED)
    parser.add_argument("--skills", default=",".join(SKILLS))
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--corpora", type=Path)
    args = parser.parse_args()
    if args.what == "texts":
        args.path.mkdir(parents=True, exist_ok=True)
        (args.path / "stories.txt").write_text(held_out_stories(200, args.seed), encoding="utf-8")
        if args.corpora:
            (args.path / "books.txt").write_text(
                "\n\n".join(read_books(args.corpora).held_out), encoding="utf-8"
            )
        return
    with LLM(args.path, n_parallel=N_PARALLEL) as llm:
        if args.what == "skills":
            for skill in args.skills.split(","):
                print(json.dumps(measure_skills(llm, [skill], args.n, args.seed)), flush=True)
        elif args.what == "stories":
            print(json.dumps(measure_stories(llm, args.n, args.seed)))
        else:
            draft = LLM(args.draft) if args.draft else None
            n_exit = int(llm.spec.metadata[f"{llm.spec.metadata['general.architecture']}.block_count"]) // 2
            print(json.dumps(measure_agreement(llm, draft, args.n, args.seed, n_exit)))
            if draft is not None:
                draft.close()


if __name__ == "__main__":
    main()
