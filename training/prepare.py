"""Makes what training needs besides this program: the vocabulary, and the books as tokens.

    python -m training.prepare --corpora FOLDER --out FOLDER [--vocabulary MODEL.gguf]

With `--vocabulary`, to train on from a finished file: the vocabulary is that file's.
Takes a minute on one core, and gives the same files each time.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from motley.bundled.recall import make_recall_prompts
from training.chat import render
from training.corpus import read_books
from training.drills import Books
from training.export import read_tokenizer
from training.lexicon import BOYS, CITIES, GIRLS, Draw
from training.mixture import MAKERS
from training.plots import write_story
from training.vocabulary import BOS_ID, load_tokenizer, train_tokenizer

RECALL = {500: 64, 2000: 200, 4000: 64}  # length of the prompts in tokens, and how many
N_DOCUMENTS = 2500  # of each kind, as a sample of what the vocabulary has to spell


def sample_texts(n: int) -> list[str]:
    draw = Draw(random.Random(0))
    texts = [write_story(draw).text for _ in range(n)]
    for kind, make in MAKERS.items():
        if kind == "forms":  # made from the vocabulary, which is not there yet
            continue
        for _ in range(n):
            tasks = make(draw)
            messages = [message for task in tasks for message in task.messages]
            texts.append(render(messages, tasks[0].tools, add_generation_prompt=False))
    return texts


def recall_items(tokenizer: Tokenizer, text: str, length: int, n: int) -> list[tuple[list[int], list[int]]]:
    """Questions and answers of the recall drill in held-out text, as token ids."""
    prompts = make_recall_prompts(lambda t: [BOS_ID, *tokenizer.encode(t).ids], text, n, length, seed=length)
    return [(list(prompt.tokens), tokenizer.encode(f" {prompt.answer}.").ids) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpora", type=Path, required=True, help="the folder of the books")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, help="take the vocabulary of this GGUF file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    splits = (read_books(args.corpora), read_books(args.corpora, as_printed=True))
    path = args.out / "tokenizer.json"
    if args.vocabulary:
        read_tokenizer(args.vocabulary).save(str(path))
    else:
        texts = [chapter for split in splits for book in split.train for chapter in book]
        train_tokenizer(texts + sample_texts(N_DOCUMENTS), never=(*GIRLS, *BOYS, *CITIES)).save(str(path))
    tokenizer = load_tokenizer(path)
    Books.encode(tokenizer, splits).save(args.out / "books.npz")
    held_out = "\n\n".join(splits[0].held_out)
    recall = {n: recall_items(tokenizer, held_out, n, count) for n, count in RECALL.items()}
    (args.out / "recall.json").write_text(json.dumps(recall))


if __name__ == "__main__":
    main()
