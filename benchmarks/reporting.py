"""Rows of a benchmark, kept as they are made."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Report:
    """Rows by name, printed and written to the file as they are made."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, Any] = {}
        self._started = time.perf_counter()

    def add(self, name: str, work: Callable[[], Any]) -> None:
        try:
            self.rows[name] = work()
        except Exception as error:
            self.rows[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            traceback.print_exc()
        elapsed = time.perf_counter() - self._started
        print(f"[{elapsed:6.1f} s] {name}: {json.dumps(self.rows[name])}", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.rows, indent=1))
