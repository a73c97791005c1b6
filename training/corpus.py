"""The public-domain books the model learns English from: cut free of what is not the book, cleaned, split."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.05  # the end of every book: never trained on

STRAIGHT = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "_": None, "\ufeff": None}
)
HEADING = re.compile(r"^(?:CHAPTER|Chapter|Letter) [\dIVXLC]+\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class Book:
    file: str
    first: str  # the text begins with the last match of this (tables of contents come before it)
    end: str  # ... and ends before this; "" for the end of the file
    is_verse: bool = False  # lines mean something


BOOKS = (
    Book("tinyshakespeare.txt", r"\AFirst Citizen:", "", is_verse=True),
    Book("war-and-peace.txt", r"\ACHAPTER I$", ""),
    Book("moby-dick.txt", r"^CHAPTER 1\. Loomings\.$", r"^End of Project Gutenberg"),
    Book("pride-and-prejudice.txt", r"^Chapter 1$", r"^End of the Project Gutenberg"),
    Book("frankenstein.txt", r"\ALetter 1$", ""),
    Book("botchan.txt", r"^CHAPTER I$", r"^\[A: "),
)


@dataclass(frozen=True)
class Split:
    train: list[list[str]]  # per book, its chapters
    held_out: list[str]  # per book, its end


def read_books(folder: Path, *, as_printed: bool = False) -> Split:
    """All books, split. The lines of a paragraph are joined, or stay `as_printed`."""
    train, held_out = [], []
    for book in BOOKS:
        text = clean(book, (folder / book.file).read_text(encoding="utf-8"))
        # Cut before joining lines, so that both forms are cut at the same paragraph.
        cut = text.rindex("\n\n", 0, int(len(text) * (1 - HELD_OUT_SHARE)))
        chapters = re.split(f"(?={HEADING.pattern})", text[:cut], flags=re.MULTILINE)
        join = str.strip if as_printed or book.is_verse else join_lines
        train.append([join(chapter) for chapter in chapters if chapter.strip()])
        held_out.append(join(text[cut:]))
    return Split(train, held_out)


def clean(book: Book, text: str) -> str:
    """The book alone, in plain punctuation, paragraphs parted by one empty line."""
    text = text.replace("\r\n", "\n").translate(STRAIGHT)
    start = list(re.finditer(book.first, text, re.MULTILINE))[-1].start()
    end = re.search(book.end, text[start:], re.MULTILINE) if book.end else None
    text = text[start:][: end.start() if end else None]
    text = re.sub(r"(?m)[ \t]+$", "", text)
    if "\n\n" not in text:
        # Botchan has no empty lines: there a short line ends a paragraph.
        text = re.sub(r"(?m)^(.{1,55})$", r"\1\n", text)
    text = HEADING.sub(r"\n\g<0>\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def join_lines(text: str) -> str:
    text = re.sub(r"(?<!\n)\n[ \t]*(?!\n)", " ", text)
    return re.sub(r" {2,}", " ", text).strip()


if __name__ == "__main__":  # python -m training.corpus FOLDER > heldout.txt
    sys.stdout.write("\n\n".join(read_books(Path(sys.argv[1])).held_out))
