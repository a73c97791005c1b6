"""Random clients against a real server for minutes: they cancel, read slowly, lie, overflow, have wrong keys, or are
killed with SIGKILL; then this counts what is left over.

    python -m benchmarks serve_soak --minutes 10

The cache holds two and a half contexts for four requests at a time, so it is always full. Good requests are greedy, and
their answers must be those of the library. At the end: no request runs, no block of the cache is in use, the numbers of
open files and threads are those of the start, memory has not grown, no process was started again, and the server ends
with exit code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from load import percentile
from serve import running

from motley import LLM
from motley.bundled import bundled_model_path

PROMPTS = ["Once upon a time", "The sea is", "A red kite", "Tell me", "Hello", "One day a fox"]
N_TOKENS = 12
KEY = "soak"


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: list[bytes] = [
    b"{",
    b"\xff" * 100,
    b"[" * 50_000,
    json.dumps({"prompt": "a", "n": 10**9}).encode(),
    json.dumps({"prompt": "a", "grammar": "(" * 5000}).encode(),
    json.dumps({"prompt": "a", "grammar": 'root ::= "a" | "(" root ")"' * 50}).encode(),
    json.dumps({"prompt": "a", "json_schema": {"type": "array", "minItems": 10**9}}).encode(),
    json.dumps({"prompt": [9] * 5000}).encode(),
    json.dumps({"prompt": [-1]}).encode(),
    json.dumps({"prompt": [10**9]}).encode(),
    json.dumps({"prompt": "a", "logit_bias": {"5": "x"}}).encode(),
    json.dumps({"prompt": "a", "grammar": 'root ::= "a"' + ' ("b"' * 3000 + ")" * 3000}).encode(),
    json.dumps({"prompt": "a", "json_schema": _nested(400)}).encode(),
    json.dumps({"prompt": "a", "regex": "(" * 2000 + "a" + ")*" * 2000}).encode(),
    json.dumps({"prompt": "word " * 400_000}).encode(),  # 2 MB
]

# A process with several open requests, which reads nothing and is killed.
VICTIM = """
import socket, sys, time
host, port, request = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
connections = []
for _ in range(3):
    connections.append(socket.create_connection((host, port)))
    connections[-1].sendall(request)
time.sleep(60)
"""

# A process that asks for /health ten times a second: what delays the clients' own event loop does not delay it.
WATCHER = """
import json, socket, sys, time
host, port, ends = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
found = []
while time.monotonic() < ends:
    started, answer = time.perf_counter(), b""
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
        while part := connection.recv(4096):
            answer += part
    found.append([time.perf_counter() - started, answer.startswith(b"HTTP/1.1 200")])
    time.sleep(0.1)
print(json.dumps(found))
"""


class Soak:
    """Clients of several kinds, chosen by chance."""

    def __init__(self, url: str, expected: dict[str, str]) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._expected = expected
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.health: list[float] = []  # seconds for each answer of /health

    async def request(
        self, path: str, body: bytes, *, leave_after: float | None = None, key: str = KEY
    ) -> tuple[int, bytes]:
        """Status and body; (0, b"") if this client left before the end."""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(_head(path, len(body), key) + body)
            if leave_after is not None:
                await asyncio.sleep(leave_after)
                return 0, b""
            data = await reader.read()
            status = int(data.split(b" ", 2)[1]) if data else -1
            return status, data.partition(b"\r\n\r\n")[2]
        finally:
            writer.close()

    async def good(self) -> None:
        prompt = random.choice(PROMPTS)
        body = {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0}
        status, data = await self.request("/completion", json.dumps(body).encode())
        if status == 429:
            self.counts["full"] += 1
        elif status != 200 or json.loads(data)["content"] != self._expected[prompt]:
            self.wrong.append(f"{prompt}: {status} {data[:200]!r}")

    async def streamed(self) -> None:
        prompt = random.choice(PROMPTS)
        body = {"prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "stream": True}
        status, data = await self.request("/v1/completions", json.dumps(body).encode())
        if status != 200:
            self.counts["full"] += status == 429
            return
        lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        if text != self._expected[prompt]:
            self.wrong.append(f"{prompt} streamed: {text!r}")

    async def leaving(self) -> None:
        body: dict[str, Any] = {
            "prompt": random.choice(PROMPTS) * random.randint(1, 40),
            "n_predict": -1,
            "context_shift": True,
            "ignore_eos": True,
            "stream": random.random() < 0.5,
            "n": random.choice([1, 1, 2, 3]),
        }
        await self.request("/completion", json.dumps(body).encode(), leave_after=random.random())

    async def hostile(self) -> None:
        status, _ = await self.request("/completion", random.choice(HOSTILE))
        if status not in (400, 413, 429, 501):
            self.wrong.append(f"hostile body: {status}")

    async def constrained(self) -> None:
        schema = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
        body = {"prompt": "JSON:", "n_predict": 60, "json_schema": {"type": "object", **schema}}
        status, data = await self.request("/completion", json.dumps(body).encode())
        if status not in (200, 429):
            self.wrong.append(f"constrained: {status}")
        if status != 200 or (result := json.loads(data))["stop_type"] == "limit":
            return  # the grammar allows any number of spaces: there may be too few tokens for the rest
        if json.loads(result["content"])["a"] not in (1, 2):
            self.wrong.append(f"constrained: {data[:200]!r}")

    async def torn(self) -> None:
        """A request that is never finished."""
        _, writer = await asyncio.open_connection(*self._address)
        writer.write(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(random.random() / 2)
        writer.close()

    async def slow(self) -> None:
        """Reads a stream in small pieces with long pauses; its text must be whole nevertheless."""
        prompt = random.choice(PROMPTS)
        body = json.dumps(
            {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection(*self._address, limit=64)
        writer.write(_head("/completion", len(body)) + body)
        data = b""
        while part := await reader.read(256):
            data += part
            await asyncio.sleep(random.random() / 20)
        writer.close()
        if data.startswith(b"HTTP/1.1 200"):
            lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
            text = "".join(json.loads(line)["content"] for line in lines)
            if text != self._expected[prompt]:
                self.wrong.append(f"{prompt} read slowly: {text!r}")

    async def huge(self) -> None:
        """A body above the limit, announced or sent."""
        _, writer = await asyncio.open_connection(*self._address)
        writer.write(_head("/completion", 2**30) + b"{" * 2**16)
        await asyncio.sleep(random.random() / 5)
        writer.close()

    async def wrong_key(self) -> None:
        status, _ = await self.request(
            "/completion", b"{}", key=random.choice(["", "soa", "soakk", "x" * 9000])
        )
        if status != 401:
            self.wrong.append(f"wrong key: {status}")

    async def killed(self) -> None:
        body = b'{"prompt": "a", "n_predict": -1, "context_shift": true, "ignore_eos": true, "stream": true}'
        request = (_head("/completion", len(body)) + body).decode()
        arguments = ["-S", "-c", VICTIM, self._address[0], str(self._address[1]), request]
        victim = await asyncio.create_subprocess_exec(sys.executable, *arguments)
        await asyncio.sleep(0.1 + random.random())
        victim.kill()
        await victim.wait()

    async def watch(self, seconds: float) -> None:
        arguments = ["-S", "-c", WATCHER, self._address[0], str(self._address[1]), str(seconds)]
        pipe = asyncio.subprocess.PIPE
        watcher = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe)
        found, _ = await watcher.communicate()
        for took, is_ok in json.loads(found):
            self.health.append(took)
            if not is_ok:
                self.wrong.append("/health did not answer 200")

    async def client(self, ends: float) -> None:
        kinds = [self.good, self.good, self.streamed, self.leaving, self.hostile, self.constrained, self.torn]
        kinds += [self.slow, self.huge, self.wrong_key, self.killed]
        while time.monotonic() < ends:
            kind = random.choice(kinds)
            self.counts[kind.__name__] += 1
            await kind()

    async def run(self, n_clients: int, seconds: float) -> None:
        ends = time.monotonic() + seconds
        await asyncio.gather(self.watch(seconds), *(self.client(ends) for _ in range(n_clients)))


def _head(path: str, length: int, key: str = KEY) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
        f"Authorization: Bearer {key}\r\nConnection: close\r\n\r\n"
    ).encode()


def resources(pid: int) -> dict[str, int]:
    """Open files, threads and resident kibibytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
        "kib": int(fields["VmRSS"].split()[0]),
    }


async def settled(soak: Soak) -> tuple[dict[str, float], bool]:
    """Figures of /metrics once no request runs, and whether that came to be."""
    for _ in range(600):
        reader, writer = await asyncio.open_connection(*soak._address)
        head = _head("/metrics", 0).replace(b"POST", b"GET")
        writer.write(head)
        text = (await reader.read()).decode()
        writer.close()
        lines = [line.split() for line in text.splitlines() if line.startswith(("llamacpp:", "motley:"))]
        figures = {name: float(value) for name, value in lines}
        if not figures["llamacpp:requests_processing"] and not figures["llamacpp:requests_deferred"]:
            return figures, True
        await asyncio.sleep(0.1)
    return figures, False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    with LLM(bundled_model_path(), n_ctx=256, n_threads=1) as llm:
        expected = {p: llm.generate(p, max_tokens=N_TOKENS, temperature=0).text for p in PROMPTS}
    flags = ["-t", "1", "-np", "4", "-c", "256", "--kv-cache-tokens", "640", "-b", "64", "--max-queue", "16"]
    flags += ["--api-key", KEY, "--metrics", "--log-disable"]
    command = [sys.executable, "-m", "motley", "serve", "--port", "0", *flags]
    with running(command, must_end_well=True) as (url, front):
        children = Path(f"/proc/{front}/task/{front}/children")
        engine = int(children.read_text().split()[0])
        soak = Soak(url, expected)
        # Everything is in use once. With more clients than later, so that pools have all their threads.
        asyncio.run(soak.run(4 * options.clients, min(20.0, 15 * options.minutes)))
        asyncio.run(settled(soak))
        before = {"front": resources(front), "engine": resources(engine)}
        asyncio.run(soak.run(options.clients, 60 * options.minutes))
        figures, is_idle = asyncio.run(settled(soak))
        has_same_engine = children.read_text().split() == [str(engine)]
        time.sleep(1)
        after = {"front": resources(front), "engine": resources(engine)}
    used = {name: value for name, value in figures.items() if name.startswith("motley:kv_n_used")}
    print(f"requests: {dict(soak.counts)}")
    print(
        f"cancelled {figures['motley:requests_cancelled_total']:.0f} of {figures['motley:requests_total']:.0f}"
    )
    health = sorted(soak.health)
    n_late = sum(took > 0.05 for took in health)
    print(
        f"/health: median {1e3 * percentile(health, 50):.1f} ms, p99 {1e3 * percentile(health, 99):.1f} ms, longest "
        f"{1e3 * health[-1]:.1f} ms; {n_late} of {len(health)} later than 50 ms"
    )
    print(f"before: {before}\nafter:  {after}\nblocks in use: {used}")
    for line in soak.wrong[:10]:
        print("wrong:", line)
    grown = {p: after[p]["kib"] - before[p]["kib"] for p in before}
    is_clean = (
        is_idle
        and has_same_engine
        and not soak.wrong
        and not any(used.values())
        and all(after[p]["files"] <= before[p]["files"] + 2 for p in before)
        and all(after[p]["threads"] <= before[p]["threads"] for p in before)
        and all(kib < 65536 for kib in grown.values())
    )
    print(f"memory grew by {grown} KiB; {'clean' if is_clean else 'NOT CLEAN'}")
    raise SystemExit(not is_clean)


if __name__ == "__main__":
    main()
