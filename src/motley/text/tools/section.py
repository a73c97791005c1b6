"""A section of calls: the text before, between and after them."""

from __future__ import annotations

from collections.abc import Callable

from motley.text.tools.format import Style, ToolFormat
from motley.text.tools.generic import GenericReader
from motley.text.tools.literals import match
from motley.text.tools.own_syntax import GemmaReader, PythonReader
from motley.text.tools.readers import Context, JsonReader, NamedReader, Reader, Status, TaggedReader


def make_reader(context: Context, form: ToolFormat) -> Reader:
    """Makes a reader for one call, from the end of `call_start` to the beginning of `call_end`."""
    match form.style:
        case Style.NAMED_JSON:
            return NamedReader(context, form)
        case Style.TAGGED:
            return TaggedReader(context, form)
        case Style.GEMMA:
            return GemmaReader(context, form)
        case _:
            return JsonReader(context, form, known_names_only=not form.trigger)


class SectionReader:
    """Reads from behind the trigger on, until what follows is no call.

    `read` returns the rest of the text and the status. FAILED: `raw` is the text that was taken since the last call,
    trigger included; it is no call.
    """

    def __init__(self, context: Context, form: ToolFormat) -> None:
        self._context, self._form = context, form
        self._taken = [form.trigger]
        self._reader: Reader | None = None
        self._step: Callable[[str, bool], tuple[int, Status | None]] = self._opening
        if form.style is Style.PYTHON:
            self._reader, self._step = PythonReader(context, form), self._whole
        elif form.style is Style.GENERIC:
            self._reader, self._step = GenericReader(context), self._whole
        at = form.opening.find(form.trigger) + len(form.trigger)
        self._rest = form.opening[at:]
        starts_object = "{" if form.style is Style.JSON else ""
        self._next = (form.separator.strip() + form.call_start.strip(), starts_object)
        self._again = (form.call_start.strip(), starts_object)

    @property
    def raw(self) -> str:
        return "".join(self._taken)

    def read(self, text: str, final: bool) -> tuple[str, Status]:
        while True:
            n, status = self._step(text, final)
            if self._reader is None or not self._reader.has_started:
                self._taken.append(text[:n])
            text = text[n:]
            if status is not None:
                return text, status

    def _opening(self, text: str, final: bool) -> tuple[int, Status | None]:
        at = match(self._rest, text)
        if at is None or at < 0:
            return 0, Status.MORE if at is None and not final else Status.FAILED
        self._begin()
        return at, None

    def _begin(self) -> None:
        self._reader, self._step = make_reader(self._context, self._form), self._call

    def _call(self, text: str, final: bool) -> tuple[int, Status | None]:
        assert self._reader is not None
        n, status = self._reader.read(text, final)
        if status is not Status.DONE:
            return n, status
        self._step = self._call_end
        return n, None

    def _whole(self, text: str, final: bool) -> tuple[int, Status | None]:
        assert self._reader is not None
        return self._reader.read(text, final)

    def _call_end(self, text: str, final: bool) -> tuple[int, Status | None]:
        at = match(self._form.call_end, text)
        if at is None and not final:
            return 0, Status.MORE
        self._step, self._reader = self._between, None
        self._taken = []
        return max(at or 0, 0), None

    def _between(self, text: str, final: bool) -> tuple[int, Status | None]:
        self._taken = []
        places = [self._start_of(*self._next, text), self._start_of(*self._again, text)]
        end = match(self._form.section_end, text) if self._form.section_end.strip() else -1
        if None in (*places, end) and not final:
            return 0, Status.MORE  # one marker may be the beginning of another
        if end is not None and end >= 0:
            return end, Status.DONE
        for at in places:
            if at is not None and at >= 0:
                self._begin()
                return at, None
        return 0, Status.DONE

    @staticmethod
    def _start_of(literal: str, after: str, text: str) -> int | None:
        """The end of the literal, if `after` follows; see `match`."""
        if not literal and not after:
            return -1
        at = match(literal, text) if literal else 0
        if at is None or at < 0 or not after:
            return at
        follows = match(after, text, at)
        return at if follows is not None and follows >= 0 else follows
