"""The front with a mock engine, in a process of its own: no torch, so it starts at once."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from motley.bundled import bundled_model_path
from motley.server.settings import Limits, ServerSettings
from motley.server.supervisor import serve

MOCK = Path(__file__).resolve().parents[2] / "benchmarks" / "mock_engine.py"


def main() -> int:
    flags = sys.argv[1:]
    if "--few-files" in flags:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    command = [sys.executable, str(MOCK), "--steps-per-second", "50"]
    settings = ServerSettings(
        model=bundled_model_path(),
        port=0,
        engine_command=tuple(command),
        restarts="--restart" in flags,
        api_keys=("key-one", "key-two") if "--keys" in flags else (),
        cors_origins=("localhost",) if "--local" in flags else ("*",),
        slot_save_path=Path(flags[flags.index("--slots") + 1]) if "--slots" in flags else None,
        limits=Limits(body_bytes=2**20, body_seconds=0.5, head_seconds=0.5, stalled_seconds=0.5)
        if "--hasty" in flags
        else Limits(body_bytes=2**20),
    )
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
