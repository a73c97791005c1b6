"""A hub on this machine: as much of Hugging Face's HTTP interface as downloads need."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandInHub:
    """Repositories as {name: {file: bytes}}. `requests` notes (method, path, Range, Authorization) of each request."""

    repos: dict[str, dict[str, bytes]]
    gated: frozenset[str] = frozenset()
    checksums: dict[str, str] = field(default_factory=dict)  # of files that the hub describes wrongly
    cut_after: int | None = None  # bytes of a file after which the connection breaks, once
    pause_after: int | None = None  # bytes of a file after which the hub waits for `go_on`, once
    go_on: threading.Event = field(default_factory=threading.Event)
    cdn: StandInHub | None = None  # files come from there: a redirection to another host
    answer: bytes | None = None  # what is said about every repository instead of its description
    lacks: frozenset[str] = frozenset()  # files that are described, but not there
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)

    def __enter__(self) -> StandInHub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def description(self, repo: str) -> bytes:
        if self.answer is not None:
            return self.answer
        siblings = [
            {
                "rfilename": name,
                "size": len(contents),
                "blobId": "b" * 40,
                "lfs": {"sha256": self.checksum(name, contents), "size": len(contents), "pointerSize": 100},
            }
            for name, contents in self.repos[repo].items()
        ]
        return json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}).encode()

    def checksum(self, name: str, contents: bytes) -> str:
        return self.checksums.get(name, hashlib.sha256(contents).hexdigest())


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._serve(with_body=False)

        def do_GET(self) -> None:
            self._serve(with_body=True)

        def _serve(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            headers = self.headers
            hub.requests.append((self.command, path, headers.get("Range"), headers.get("Authorization")))
            words = path.split("/")
            is_api = words[:2] == ["api", "models"]
            repo = "/".join(words[2:4] if is_api else words[:2])
            if repo in hub.gated:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            elif repo not in hub.repos:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif is_api:
                self._send(200, hub.description(repo), {"Content-Type": "application/json"})
            else:
                self._send_file("/".join(words[4:]), hub.repos[repo], with_body)

        def _send_file(self, name: str, files: dict[str, bytes], with_body: bool) -> None:
            if name in hub.lacks:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            contents = files[name]
            etag = hub.checksum(name, contents)
            headers = {
                "ETag": f'"{etag}"',
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(contents)),
                "X-Linked-Etag": f'"{etag}"',
                "Accept-Ranges": "bytes",
            }
            if hub.cdn is not None:
                self._send(302, b"", headers | {"Location": f"{hub.cdn.endpoint}{self.path}"})
                return
            start = 0
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(contents) - 1}/{len(contents)}"
            body = contents[start:]
            if with_body and hub.cut_after is not None:
                cut, hub.cut_after = hub.cut_after, None
                self._send(206 if start else 200, body[:cut], headers | {"Content-Length": str(len(body))})
                self.close_connection = True
                return
            if with_body and hub.pause_after is not None:
                n_first, hub.pause_after = hub.pause_after, None
                self._send(
                    206 if start else 200, body[:n_first], headers | {"Content-Length": str(len(body))}
                )
                hub.go_on.wait(300)
                with contextlib.suppress(OSError):  # the reader may have gone
                    self.wfile.write(body[n_first:])
                return
            self._send(206 if start else 200, body, headers, with_body=with_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body and self.command != "HEAD":
                self.wfile.write(body)

    return Handler
