"""The flags for speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from motley.cli.options.flag import flag

_PANEL = "Speculation"  # of --help

Spec = Annotated[
    str | None,
    flag(
        "--spec",
        "--spec-type",
        text="Guess the next tokens and check several in one step; the text stays the same. auto: lookup, while it "
        "helps; off; or comma-separated: lookup (in the text itself), lookahead, draft (needs -md), exit (the first "
        "layers), mtp (the file's prediction layer). "
        "Default: auto, and draft with -md.",
        panel=_PANEL,
        metavar="NAMES",
        show_default=False,
    ),
]
DraftMax = Annotated[
    int | None,
    flag(
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        text="Guess at most this many tokens at a time. Default: 15.",
        panel=_PANEL,
        metavar="N",
        show_default=False,
    ),
]
DraftMin = Annotated[
    int | None,
    flag(
        "--draft-min",
        "--draft-n-min",
        "--spec-draft-n-min",
        text="Use no guess with fewer tokens than this. Default: 0.",
        panel=_PANEL,
        metavar="N",
        show_default=False,
    ),
]
ModelDraft = Annotated[
    Path | None,
    flag(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        text="A smaller model with the same vocabulary, for --spec draft.",
        panel=_PANEL,
        metavar="FILE",
        show_default=False,
    ),
]
LookaheadFlag = Annotated[
    str | None,
    flag(
        "--lookahead",
        text="For --spec lookahead: tokens in the window and in an n-gram, n-grams kept for a token. Default: 7,5,7.",
        panel=_PANEL,
        metavar="W,N,G",
        show_default=False,
    ),
]
LookupAnswers = Annotated[
    int,
    flag(
        "--lookup-answers",
        text="Also guess from this many tokens of finished answers of the same user (cache_salt). "
        "The speed of an answer then reveals their content. Default: 0.",
        panel=_PANEL,
        metavar="N",
        show_default=False,
    ),
]
DraftLayers = Annotated[
    int | None,
    flag(
        "--draft-layers",
        text="Layers that guess with --spec exit. Default: half of the model's.",
        panel=_PANEL,
        metavar="N",
        min=1,
        show_default=False,
    ),
]
