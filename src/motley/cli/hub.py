"""Models from a hub, through huggingface_hub: download, list and remove them in its usual cache folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.caches import cache_folder
from motley.cli.hub_download import (
    download_blob,
    is_sha256,
    link_blob,
    reporting,
    require_plain,
    sha256_of,
)
from motley.cli.hub_names import HubModel, HubName, choose, find_models
from motley.errors import ConfigError
from motley.units import show_bytes

Progress = Callable[[int, int], None]
Say = Callable[[str], None]
_OTHER_FOLDER = "HF_HOME names another folder"


@dataclass(frozen=True)
class StoredModel:
    """A model in the cache folder."""

    name: HubName
    files: tuple[Path, ...]
    n_bytes: int


@dataclass(frozen=True)
class _Remote:
    """The hub's description of a repository's files: sizes, and checksums if it has them."""

    sizes: dict[str, int]
    checksums: dict[str, str]
    revision: str


class Hub:
    """The hub at HF_ENDPOINT, and its cache folder (HF_HOME, HF_HUB_CACHE). The token is HF_TOKEN, or the given one."""

    def __init__(self, *, token: str | None = None, is_offline: bool = False) -> None:
        try:
            import huggingface_hub
            import huggingface_hub.constants
            import huggingface_hub.errors
            import huggingface_hub.file_download
            import huggingface_hub.utils
        except ImportError:
            raise ConfigError(
                "huggingface_hub is not installed, which downloads models",
                hint="pip install 'motley-llm[hub]'",
            ) from None
        self._hub: Any = huggingface_hub
        self._token = token
        self._is_offline = is_offline or bool(huggingface_hub.constants.HF_HUB_OFFLINE)

    def fetch(self, name: HubName, progress: Progress, say: Say, file: str | None = None) -> Path:
        """The (first) file of the model, downloaded if it is not in the cache folder."""
        if self._is_offline:
            return self._from_cache(name, file, "offline")
        try:
            remote = self._look(name)
        except _UnreachableError as error:
            path = self._from_cache(name, file, str(error))
            say(f"note: {error}; the model comes from the cache folder")
            return path
        model = choose(name, find_models(remote.sizes), file)
        if name.quant is None and file is None:
            say(f"{name.repo}: {model.quant or model.files[0]}")
        try:
            return self._download(name, model, remote, progress)
        except _UnreachableError as error:
            raise ConfigError(
                f"the download of {name} broke off: {error}", hint="the same command continues it"
            ) from error

    def stored(self) -> list[StoredModel]:
        """All models in the cache folder."""
        found = []
        for repo, snapshot, files in self._snapshots():
            for model in find_models(files):
                paths = tuple(snapshot / file for file in model.files)
                n_bytes = sum(path.stat().st_size for path in paths)
                found.append(StoredModel(HubName(repo, model.quant or None), paths, n_bytes))
        return sorted(found, key=lambda model: str(model.name))

    def remove(self, name: HubName) -> int:
        """Deletes a repository's models from the cache folder, or one of them. Returns the bytes that this frees."""
        stored = [model for model in self.stored() if model.name.repo.lower() == name.repo.lower()]
        if name.quant is not None:
            stored = [m for m in stored if (m.name.quant or "").lower() == name.quant.lower()]
        if (
            not stored and name.quant is None and self._repo_folder(name.repo).is_dir()
        ):  # an interrupted download
            n_bytes = sum(path.stat().st_size for path in (self._repo_folder(name.repo) / "blobs").glob("*"))
            self._remove_folder(name.repo)
            return n_bytes
        if not stored:
            there = ", ".join(str(model.name) for model in self.stored()) or "nothing"
            raise ConfigError(f"{name} is not in the cache folder", hint=f"there is: {there}")
        for model in stored:
            for path in model.files:
                blob = path.resolve()
                path.unlink()
                blob.unlink(missing_ok=True)
        if name.quant is None:
            self._remove_folder(stored[0].name.repo)
        return sum(model.n_bytes for model in stored)

    def _look(self, name: HubName) -> _Remote:
        with _explaining(self._hub, name):
            info = self._hub.HfApi(token=self._token).model_info(name.repo, files_metadata=True)
        files = info.siblings or []
        return _Remote(
            {file.rfilename: file.size or 0 for file in files},
            {file.rfilename: file.lfs["sha256"] for file in files if file.lfs},
            info.sha or "main",
        )

    def _download(self, name: HubName, model: HubModel, remote: _Remote, progress: Progress) -> Path:
        total = sum(remote.sizes[file] for file in model.files)
        self._require_room(name, model, total, remote)
        n_before, paths = 0, []
        for file in model.files:

            def advance(done: int, before: int = n_before) -> None:
                progress(min(before + done, total), total)

            with _explaining(self._hub, name, file):
                path = self._download_file(name, file, remote, advance)
            self._verify(path, file, remote)
            paths.append(path)
            n_before += remote.sizes[file]
        return paths[0]

    def _download_file(
        self, name: HubName, file: str, remote: _Remote, advance: Callable[[int], None]
    ) -> Path:
        """The file in the cache folder. What the hub says becomes names of files there, and is not trusted."""
        folder, url = (
            self._repo_folder(name.repo),
            self._hub.hf_hub_url(name.repo, file, revision=remote.revision),
        )
        checksum, size = remote.checksums.get(file), remote.sizes[file]
        is_large = (
            size > self._hub.constants.MAX_HTTP_DOWNLOAD_SIZE
        )  # hubs send such files only through hf_xet
        if checksum is not None and is_sha256(checksum) and size > 0 and not is_large:
            require_plain(remote.revision, name.repo)
            blob, path = folder / "blobs" / checksum, folder / "snapshots" / remote.revision / file
            if not blob.exists():
                download_blob(self._hub, url, blob, size, token=self._token, advance=advance)
            link_blob(blob, path)
            return path
        described = self._hub.get_hf_file_metadata(url, token=self._token)
        require_plain(described.etag or "none", name.repo)
        require_plain(described.commit_hash or "none", name.repo)
        return Path(
            self._hub.hf_hub_download(
                name.repo,
                file,
                revision=remote.revision,
                token=self._token,
                tqdm_class=reporting(self._hub, advance),
            )
        )

    def _verify(self, path: Path, file: str, remote: _Remote) -> None:
        """Compares a file with the hub's checksum, once: a mark in Motley's own cache folder says that it was done."""
        wanted, blob = remote.checksums.get(file), path.resolve()
        if wanted is None:
            return
        is_checksum = is_sha256(wanted)  # it becomes the name of a file
        status = blob.stat()
        state = f"{status.st_size} {status.st_mtime_ns}"
        if is_checksum and _mark_of(wanted) == state:
            return
        if sha256_of(blob) != wanted:
            path.unlink()
            blob.unlink(missing_ok=True)
            raise ConfigError(
                f"{file} does not have the hub's checksum, and was deleted", hint="download it again"
            )
        # Without a folder that can be written, the file is compared again next time.
        with suppress(OSError, ConfigError):
            _marks().mkdir(parents=True, exist_ok=True)
            (_marks() / (wanted if is_checksum else "none")).write_text(state)

    def _require_room(self, name: HubName, model: HubModel, total: int, remote: _Remote) -> None:
        """ConfigError if the disk has too little room for what is not there yet."""
        folder = self._folder
        while not folder.exists():
            folder = folder.parent
        there = [
            self._hub.try_to_load_from_cache(name.repo, file, revision=remote.revision)
            for file in model.files
        ]
        missing = sum(
            remote.sizes[file]
            for file, path in zip(model.files, there, strict=True)
            if not isinstance(path, str)
        )
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise ConfigError(
                f"{name} needs {show_bytes(missing)}, but {self._folder} has {show_bytes(free)} left",
                hint=f"{_OTHER_FOLDER}; motley rm removes models",
            )

    def _from_cache(self, name: HubName, file: str | None, reason: str) -> Path:
        for repo, snapshot, files in self._snapshots():
            if repo.lower() == name.repo.lower() and (models := find_models(files)):
                return snapshot / choose(name, models, file).files[0]
        raise ConfigError(
            f"{name} is not in the cache folder {self._folder} ({reason})",
            hint="motley list shows what is there",
        )

    def _snapshots(self) -> Iterator[tuple[str, Path, list[str]]]:
        """Each repository of the cache folder with its latest snapshot and the files in it."""
        for folder in sorted(self._folder.glob("models--*")):
            snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
            if not snapshots:
                continue
            latest = max(snapshots, key=lambda path: path.stat().st_mtime)
            files = [path.relative_to(latest).as_posix() for path in latest.rglob("*.gguf") if path.exists()]
            yield folder.name.removeprefix("models--").replace("--", "/", 1), latest, files

    def _remove_folder(self, repo: str) -> None:
        shutil.rmtree(self._repo_folder(repo), ignore_errors=True)

    def _repo_folder(self, repo: str) -> Path:
        return self._folder / f"models--{repo.replace('/', '--')}"

    @property
    def _folder(self) -> Path:
        return Path(self._hub.constants.HF_HUB_CACHE)


def _marks() -> Path:
    """The folder with a file for each checksum that was compared."""
    return cache_folder() / "verified"


def _mark_of(checksum: str) -> str | None:
    """The state of the file that was compared with a checksum; None: not known."""
    with suppress(OSError, ValueError, ConfigError):  # ValueError: no UTF-8
        return (_marks() / checksum).read_text(encoding="utf-8")
    return None


class _UnreachableError(Exception):
    """The hub did not answer."""


@contextmanager
def _explaining(hub: Any, name: HubName, file: str = "") -> Iterator[None]:
    """Errors of huggingface_hub and of the network, as Motley's."""
    errors = hub.errors
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name.repo} is gated", hint="accept its terms on the hub's site, and set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"the hub has no repository {name.repo}", hint="check the name; a private one needs HF_TOKEN"
        ) from None
    except errors.EntryNotFoundError:
        raise ConfigError(
            f"the hub has no file {file} in {name.repo}", hint="it may have been renamed: try again"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{name.repo}: {error}", hint="for example USER/REPO:Q4_K_M") from None
    except ConfigError:
        raise
    except Exception as error:  # of any HTTP library that huggingface_hub uses
        status = getattr(getattr(error, "response", None), "status_code", None)
        endpoint = os.environ.get("HF_ENDPOINT", hub.constants.ENDPOINT)
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if status is not None and status < 500:
            raise ConfigError(f"{endpoint} refused {name.repo}: {first}") from error
        if isinstance(error, OSError) and error.filename is not None:  # of the cache folder
            raise ConfigError(f"{error.filename}: {error.strerror}", hint=_OTHER_FOLDER) from error
        if isinstance(error, (ValueError, TypeError, LookupError)):
            raise ConfigError(
                f"{endpoint} sent an answer about {name.repo} that is not a hub's: {first}",
                hint="check HF_ENDPOINT and HF_TOKEN",
            ) from error
        raise _UnreachableError(f"{endpoint} cannot be reached: {first}") from error
