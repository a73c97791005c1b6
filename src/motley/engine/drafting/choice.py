"""Which drafters are chosen: `--spec`, `LLM(spec=…)` and `SamplingParams(speculative=…)`. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from motley.errors import RequestError

DRAFT_MAX = 15  # tokens of a draft, by default: with one more they fill 16 rows
MAX_DRAFT = 63  # with one more they are all rows of logits of a step

OFF, AUTO = "off", "auto"
DRAFTERS = ("grammar", "lookup", "draft", "exit", "lookahead", "mtp")
AUTO_DRAFTERS = ("grammar", "lookup")  # what needs nothing, and costs nothing where it does not help
DEFAULT = AUTO

# llama.cpp's names for the same.
_ALIASES = {
    "none": OFF,
    "ngram-simple": "lookup",
    "ngram-map-k": "lookup",
    "ngram-map-k4v": "lookup",
    "ngram-mod": "lookup",
    "ngram-cache": "lookup",
    "draft-simple": "draft",
    "draft-mtp": "mtp",
}
_NEEDS = {
    "mtp": "the model has no multi-token prediction layer (nextn), or was loaded without it (--spec mtp, LLM(spec=…))",
    "draft": "there is no draft model (-md, --model-draft, draft_model=…)",
    "exit": "the model has no layer to leave out, or has layers with a recurrent state, which cannot forget drafts",
}


def default_choice(has_draft: bool) -> str:
    """The drafters if the user chooses none: `auto`, and `draft` if there is a draft model."""
    return f"{','.join(AUTO_DRAFTERS)},draft" if has_draft and DEFAULT == AUTO else DEFAULT


def names_drafter(text: str | None, drafter: str) -> bool:
    """Whether a choice names a drafter."""
    return drafter in [
        _ALIASES.get(name, name) for name in (part.strip().lower() for part in (text or "").split(","))
    ]


def read_choice(text: str, has: Collection[str]) -> tuple[str, ...]:
    """The drafters that `text` names. RequestError for unknown ones, and for drafters that are not in `has`."""
    names = [_ALIASES.get(name, name) for name in (part.strip().lower() for part in text.split(","))]
    if names == [OFF]:
        return ()
    if names == [AUTO]:
        return tuple(name for name in AUTO_DRAFTERS if name in has)
    for name in names:
        if name in has:
            continue
        if name in (OFF, AUTO):
            raise _refused(text, f"{name} stands alone")
        if name not in DRAFTERS:
            raise _refused(text, f"there is no drafter {name!r:.60}")
        raise _refused(text, _NEEDS.get(name) or "this engine has no such drafter")
    return tuple(dict.fromkeys(names))


def _refused(text: str, why: str) -> RequestError:
    return RequestError(
        f"speculation {text!r:.60} is not possible: {why}",
        hint="--spec (speculative) must be auto, off, or a list by comma: grammar, lookup, lookahead, draft, exit, mtp",
    )
