"""The mixture of skills: whole conversations, stories and drills as token ids, packed into rows.

Each token of a row has a kind: NO_LOSS (what the user says, padding), TEXT (stories and books: every token is
learned) or ANSWER (what the assistant says). A row holds several documents; each begins with the BOS token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.chat import DEFAULT_SYSTEM, Message, Task, render
from training.drills import ANSWER, NO_LOSS, TEXT, Books, Drills, Ids
from training.lexicon import Draw
from training.plots import write_story
from training.skills import facts, numbers, smalltalk, telling, tools, words
from training.skills import fields as json_fields
from training.skills.smalltalk import system_prompt
from training.vocabulary import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, PAD_ID, whole_words

Kinds = NDArray[np.int8]
Row = tuple[Ids, Kinds]


@dataclass(frozen=True)
class Shares:
    """How often each kind of document is made (by count of documents, except `drill` and `book`: by rows)."""

    drill: float = 0.12  # of the rows: recall drills
    book: float = 0.06  # of the rows: windows of the books
    plain_story: float = 0.06  # of the documents from here on: a story without a conversation
    story: float = 0.16
    story_questions: float = 0.06
    context: float = 0.14
    secrets: float = 0.04
    sums: float = 0.12
    comparisons: float = 0.04
    words: float = 0.16
    json: float = 0.16
    tool_call: float = 0.16
    smalltalk: float = 0.08
    unknown: float = 0.04
    memory: float = 0.03
    forms: float = 0.06


def one_of(*makers: Callable[[Draw], Task]) -> Callable[[Draw], list[Task]]:
    return lambda draw: [draw.pick(makers)(draw)]


MAKERS: dict[str, Callable[[Draw], list[Task]]] = {
    "story": one_of(telling.tell),
    "story_questions": telling.tell_and_ask,
    "context": one_of(facts.context),
    "secrets": one_of(facts.secrets),
    "sums": one_of(numbers.sums),
    "comparisons": one_of(numbers.comparisons),
    "words": one_of(*2 * (words.spelling, words.sorting), words.reversing, words.counting, words.repeating),
    "json": one_of(json_fields.extraction),
    "tool_call": tools.work,
    "smalltalk": one_of(smalltalk.smalltalk, smalltalk.smalltalk, smalltalk.named_self),
    "unknown": one_of(smalltalk.unknowable),
    "memory": smalltalk.introduction,
    "forms": one_of(words.forms),
}  # fmt: skip
SHORT = ("sums", "comparisons", "words", "smalltalk", "unknown", "secrets", "context", "json", "forms")


@dataclass
class Mixture:
    """An endless source of rows. One per process."""

    tokenizer: Tokenizer
    books: Books
    seed: tuple[int, ...]
    shares: Shares = field(default_factory=Shares)

    def __post_init__(self) -> None:
        self.draw = Draw(random.Random(hash(self.seed)), vocabulary=whole_words(self.tokenizer))
        self.rng = np.random.default_rng(self.seed)
        self.drills = Drills(self.tokenizer, self.books, self.rng)
        names = [f.name for f in fields(Shares) if f.name not in ("drill", "book")]
        self.kinds, self.weights = names, [getattr(self.shares, name) for name in names]
        self.assistant = self.tokenizer.token_to_id("assistant")
        assert self.assistant is not None
        self.pending: list[Row] = []  # documents that did not fit into the last row

    def document(self) -> Row:
        kind = self.draw.rng.choices(self.kinds, self.weights)[0]
        if kind == "plain_story":
            ids = [BOS_ID, *self.tokenizer.encode(write_story(self.draw).text).ids, EOS_ID]
            return np.array(ids, np.int16), np.full(len(ids), TEXT, np.int8)
        tasks = MAKERS[kind](self.draw)
        if kind in SHORT:
            # Short questions come several in a row, of the same or another kind, as in a real conversation.
            while self.draw.chance(0.65):
                tasks += MAKERS[kind if self.draw.chance(0.5) else self.draw.pick(SHORT)](self.draw)
        elif kind not in ("memory", "unknown") and self.draw.chance(0.2):
            tasks += MAKERS[self.draw.pick(("sums", "words", "smalltalk"))](self.draw)
        return self.conversation(tasks)

    def conversation(self, tasks: list[Task]) -> Row:
        systems = [task.system for task in tasks if task.system is not None]
        system = systems[0] if systems else system_prompt(self.draw)
        # A second name of the model would contradict the first.
        tasks = [task for task in tasks if task.system in (None, system)]
        messages: list[Message] = [m for task in tasks for m in task.messages]
        if system != DEFAULT_SYSTEM or self.draw.chance(0.5):
            messages.insert(0, {"role": "system", "content": system})
        specs = next((task.tools for task in tasks if task.tools), ())
        text = render(messages, specs, add_generation_prompt=False)
        ids = np.array([BOS_ID, *self.tokenizer.encode(text).ids], np.int16)
        is_story = bool(tasks) and tasks[0].skill == telling.STORY
        return ids, self.answer_kinds(ids, TEXT if is_story else ANSWER)

    def answer_kinds(self, ids: Ids, first: int) -> Kinds:
        """Marks what the assistant says, its end included: the first answer with `first`, others as ANSWER."""
        kinds = np.zeros(len(ids), np.int8)
        starts = np.flatnonzero((ids[:-1] == IM_START_ID) & (ids[1:] == self.assistant)) + 3
        ends = np.flatnonzero(ids == IM_END_ID) + 1
        for i, (start, end) in enumerate(zip(starts, ends[np.searchsorted(ends, starts)], strict=True)):
            kinds[start:end] = ANSWER if i else first
        return kinds

    def row(self, length: int) -> Row:
        kind = self.draw.random()
        if kind < self.shares.drill:
            return self.drills.drill(length)
        if kind < self.shares.drill + self.shares.book:
            return self.drills.window(length)
        return self.packed(length)

    def packed(self, length: int) -> Row:
        """Documents one after the other until the next would not fit; the rest is padding."""
        ids, kinds = np.full(length, PAD_ID, np.int16), np.full(length, NO_LOSS, np.int8)
        n = misses = 0
        while misses < 6 and n < length - 24:
            document = self.pending.pop(0) if self.pending and misses == 0 else self.document()
            size = len(document[0])
            if size > length:
                continue
            if n + size > length:
                misses += 1
                if len(self.pending) < 8:
                    self.pending.append(document)
                continue
            ids[n : n + size], kinds[n : n + size] = document
            n += size
        return ids, kinds
