"""Texts for `benchmarks speculation`: prompts, and answers that are written down."""

from __future__ import annotations

import inspect
import json
import random
from dataclasses import dataclass, replace
from typing import Any

from motley.engine import SamplingParams, pacing
from motley.text import Tokenizer

WRITTEN = ("code", "json", "records", "question")

_NAMES = (
    *("Ada", "Bruno", "Clara", "Dov", "Edith", "Felix", "Greta", "Hugo"),
    *("Irma", "Jonas", "Karla", "Leon", "Mila", "Nils", "Olga", "Paul"),
)
_CITIES = ("Bern", "Oslo", "Turin", "Porto", "Ghent", "Lyon", "Graz", "Split", "Bergen", "Tartu")
_QUESTIONS = (
    "Tell me a story about a dog who finds a red ball.",
    "Tell me a story about a girl and her grandfather.",
    "Write a story about a cat on a boat.",
    "Tell me a story about two friends in the rain.",
)
_REPEATED = (
    "The dog ran to the park. The cat sat on the mat. ",
    "One day Tom had a red ball, and Mia had a blue ball. ",
    "We sing and we dance, we dance and we sing. ",
    "The sun is up, the birds are awake, and the children play. ",
)
_CHAT = ("Hello! How are you?", "What can you do?", "Who are you?", "What is 12 + 30?", "Say something nice.")


@dataclass(frozen=True)
class Sample:
    """A prompt, and the answer that is written down for it; None: the model's own."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    sampling: SamplingParams

    def params(self, **changes: Any) -> SamplingParams:
        return replace(self.sampling, **changes)


def written_samples(tokenizer: Tokenizer, workload: str, n: int, n_tokens: int) -> list[Sample]:
    """`n` different samples of a workload whose answers are written down."""
    make = {"code": _code_edit, "json": _agent_state, "records": _json_records, "question": _quoted}[workload]
    samples = []
    for number in range(n):
        question, answer = make(random.Random(number))
        prompt = tuple(tokenizer.encode(question))
        text = tuple(tokenizer.encode(answer, add_special=False))[:n_tokens]
        params = SamplingParams(temperature=0, max_tokens=len(text), ignore_eos=True)
        samples.append(Sample(prompt, text, params))
    return samples


def own_samples(tokenizer: Tokenizer, workload: str, n: int, n_tokens: int) -> list[Sample]:
    """`n` different samples that the model answers by itself."""
    samples = []
    for number in range(n):
        params = SamplingParams(seed=number, max_tokens=n_tokens, ignore_eos=True)
        if workload == "random":  # every token is nearly equally likely
            rng = random.Random(number)
            prompt = [rng.randrange(5, tokenizer.n_vocab) for _ in range(100)]
            params = replace(params, temperature=8.0, top_k=0, top_p=1.0, min_p=0.0)
        elif workload == "repeated":  # the model goes on with it
            prompt = tokenizer.encode(_REPEATED[number % len(_REPEATED)] * 6)
            params = replace(params, temperature=0)
        elif workload == "chat":
            turns = f"<|im_start|>user\n{_CHAT[number % len(_CHAT)]}<|im_end|>\n<|im_start|>assistant\n"
            prompt = tokenizer.encode(turns)
        else:
            turns = (
                f"<|im_start|>user\n{_QUESTIONS[number % len(_QUESTIONS)]}<|im_end|>\n<|im_start|>assistant\n"
            )
            prompt = tokenizer.encode(turns)
            params = replace(params, temperature=0) if number % 2 == 0 else params
        samples.append(Sample(tuple(prompt), None, params))
    return samples


def _code_edit(rng: random.Random) -> tuple[str, str]:
    """A module of this package, and the same with two names changed."""
    source = inspect.getsource(pacing)
    source = source[source.index("class Pace") :]
    edited = source.replace("max_prompt_tokens", rng.choice(["most_prompt_tokens", "prompt_limit"]))
    edited = edited.replace("self._costs", rng.choice(["self._seconds", "self._measured"]))
    return f"Rename a method and a field.\n\n{source}\n\nThe whole file:\n\n", edited


def _agent_state(rng: random.Random) -> tuple[str, str]:
    """The state of a task as JSON, and the state after one more step: what an agent writes again and again."""
    steps = [
        {
            "id": number,
            "tool": rng.choice(["search", "read_file", "run_tests", "write_file"]),
            "path": f"src/{rng.choice(_NAMES).lower()}/{rng.choice(_CITIES).lower()}.py",
            "status": "done" if number < 4 else "open",
        }
        for number in range(8)
    ]
    state = {"task": "rename the parser's fields", "owner": rng.choice(_NAMES), "steps": steps}
    before = json.dumps(state, indent=2)
    steps[4]["status"] = "done"
    steps[5]["status"] = "running"
    return f"The state:\n{before}\n\nAfter step 4, the state is:\n", json.dumps(state, indent=2)


def _json_records(rng: random.Random) -> tuple[str, str]:
    """Lines about people, and the same as JSON: every value is new after its key."""
    people = [
        {
            "name": rng.choice(_NAMES),
            "city": rng.choice(_CITIES),
            "age": rng.randint(18, 80),
            "is_member": rng.random() < 0.5,
        }
        for _ in range(12)
    ]
    lines = "\n".join(f"{p['name']} is {p['age']}, lives in {p['city']}." for p in people)
    example = json.dumps({"name": "Zoe", "city": "Rome", "age": 30, "is_member": True})
    return f"As JSON, one object a line, like {example}\n\n{lines}\n\n", "\n".join(map(json.dumps, people))


def _quoted(rng: random.Random) -> tuple[str, str]:
    """A long text, and an answer that quotes it now and then."""
    sentences = []
    for number in range(60):
        a, b = rng.sample(_NAMES, 2)
        verb = rng.choice(["met", "wrote to", "waited for", "visited", "called"])
        sentences.append(
            f"On day {number + 1}, {a} {verb} {b} in {rng.choice(_CITIES)}, and the weather was "
            f"{rng.choice(['fair', 'wet', 'cold', 'mild'])}."
        )
    quoted = rng.sample(sentences, 5)
    answer = " ".join(
        f"{rng.choice(['The text says', 'We also read', 'Later it says', 'It is written'])}: “{sentence}” "
        f"This {rng.choice(['is what was asked for', 'agrees with the rest', 'may be a mistake'])}."
        for sentence in quoted
    )
    return "\n".join(sentences) + "\n\nWhat happened, with quotations?\n\n", answer
