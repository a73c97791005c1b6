"""The download of one large file of a hub, which a later process continues after an interruption.

huggingface_hub 2.4 continues a download only within a process: each process writes to a file of its own and deletes it
on failure. Here the incomplete file has a fixed name in the cache folder. When it is complete, it is renamed to the
blob that huggingface_hub would have written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from motley.errors import ConfigError

CHUNK = 1 << 22  # bytes
_SHA256 = re.compile("[0-9a-f]{64}")
_PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)


def is_sha256(text: str | None) -> bool:
    """Whether this is a checksum, and so can be the name of a file."""
    return text is not None and _SHA256.fullmatch(text) is not None


def require_plain(name: str, repo: str) -> None:
    """ConfigError if a revision or a tag of the hub would lead out of the cache folder as the name of a file."""
    if _PLAIN.fullmatch(name) is None:
        raise ConfigError(f"the hub describes {repo} with {name!r}", hint="check HF_ENDPOINT: is it a hub?")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def reporting(hub: Any, advance: Callable[[int], None]) -> Any:
    """A progress bar for huggingface_hub that draws nothing and calls `advance` with the bytes of the file so far."""

    class Reporting(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._done = int(options.get("initial") or 0)  # where a broken download continues
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            advance(self._done)

    return Reporting


def download_blob(
    hub: Any, url: str, blob: Path, size: int, *, token: str | None, advance: Callable[[int], None]
) -> None:
    """Downloads `url` to `blob`, from where an earlier download has ended. A second process waits for the first."""
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.motley-part")
    with partial.open("ab", buffering=0) as stream:  # unbuffered: what is counted is in the file
        fcntl.flock(stream, fcntl.LOCK_EX)
        if blob.exists():  # another process was first, and has renamed the file that was opened
            partial.unlink(missing_ok=True)
            return
        n_there = os.fstat(stream.fileno()).st_size
        if n_there > size:  # not a beginning of this file
            stream.truncate(0)
            n_there = 0
        if n_there:
            advance(n_there)
        hub.file_download.http_get(
            url,
            stream,
            resume_size=n_there,
            headers=hub.utils.build_hf_headers(token=token),
            expected_size=size,
            tqdm_class=reporting(hub, advance),
        )
        os.replace(partial, blob)


def link_blob(blob: Path, path: Path) -> None:
    """Makes `path`, a file of a snapshot, a relative link to `blob`; where there are no links, a second name of it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a link to a blob that was deleted
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except FileExistsError:  # another process was first
        pass
    except OSError:
        os.link(blob, path)
