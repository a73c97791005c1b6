"""Records of the kernels that were compiled for a model: files beside Triton's compiled kernels. Needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs

from motley.compile_process import MANIFEST

_MAX_FILE = 2**24  # bytes
READY = "ready at "  # what the compile process writes when it takes jobs, followed by `time.monotonic()`


@dataclass(frozen=True)
class Compiled:
    """The result of a job."""

    name: str
    seconds: float
    error: str | None = None


class Manifest:
    """A file in Triton's cache folder that lists the kernels compiled for a model. Deleting the folder deletes it."""

    def __init__(self, *description: object) -> None:
        """`description`: everything that the variants depend on, except the kernels' source and Triton's version."""
        text = repr((triton.__version__, _source_hash(), *description))
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = Path(knobs.cache.dir) / MANIFEST.format(name)

    @property
    def exists(self) -> bool:
        """Whether the file is there and whole. Without it, kernels are compiled again, or found in Triton's cache."""
        try:
            about = self.path.stat()
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_FILE:  # a pipe would never end
                return False
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(content, dict) and isinstance(content.get("kernels"), list)

    def write(self, compiled: Iterable[Compiled]) -> None:
        write_manifest(self.path, compiled)


def write_manifest(path: Path, compiled: Iterable[Compiled]) -> None:
    """Write the file. If the folder is not writable, no error is raised, and kernels are compiled again later."""
    kernels = [[each.name, round(each.seconds, 3)] for each in compiled]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A random name, because containers that share the folder have the same process ids; not that of a temporary
        # file, which other users, who may share the folder, too, could not read.
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with unfinished.open("x", encoding="utf-8") as file:
                json.dump({"written": time.time(), "kernels": kernels}, file)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


class CompiledJobs:
    """The jobs of one process, and the manifests that are written when their first `n_jobs` jobs are done."""

    def __init__(self) -> None:
        self._done: dict[int, Compiled] = {}
        self._waiting: list[tuple[int, Path]] = []  # number of jobs, and the manifest's file

    def expect(self, n_jobs: int, path: Path) -> None:
        """Write a manifest when the first `n_jobs` are done; never, if one has failed."""
        self._waiting.append((n_jobs, path))
        self._write()

    def note(self, number: int, compiled: Compiled) -> None:
        """A job is done."""
        self._done[number] = compiled
        self._write()

    def _write(self) -> None:
        for n_jobs, path in list(self._waiting):
            done = [self._done[i] for i in range(n_jobs) if i in self._done]
            if len(done) == n_jobs:
                self._waiting.remove((n_jobs, path))
                if not any(each.error for each in done):
                    write_manifest(path, done)


def _source_hash() -> str:
    folder = Path(__file__).parent
    files = [*sorted((folder / "kernels").glob("*.py")), folder / "attending.py", folder / "steps.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files if path.exists())).hexdigest()
