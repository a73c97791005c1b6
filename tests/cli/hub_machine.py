"""A machine with an empty cache folder that knows one hub, for the tests of `-hf`, `pull`, `list` and `rm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stand_in_hub import StandInHub

from motley.bundled import bundled_model_path

# Runs several commands in one process, as each process pays for its imports.
_DRIVER = """
import json, sys
from typer.testing import CliRunner
from motley.cli import app
for line in sys.stdin:
    result = CliRunner().invoke(app, json.loads(line), prog_name="motley")
    print(json.dumps([result.exit_code, result.stdout, result.stderr]), flush=True)
"""


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str


@dataclass
class Machine:
    """A machine with an empty cache folder that knows one hub."""

    hub: StandInHub
    folder: Path

    def motley(self, *commands: list[str], **environment: str) -> list[Outcome]:
        lines = "".join(json.dumps(command) + "\n" for command in commands)
        result = subprocess.run(
            [sys.executable, "-c", _DRIVER],
            input=lines,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env=self.environment(**environment),
        )
        return [Outcome(*json.loads(line)) for line in result.stdout.splitlines()]

    def environment(self, **more: str) -> dict[str, str]:
        ours = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.folder), "HF_HUB_DISABLE_XET": "1"}
        ours["XDG_CACHE_HOME"] = str(self.folder.parent / "cache")
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()
        }
        return inherited | ours | more


def repositories() -> dict[str, dict[str, bytes]]:
    """The files of the stand-in's repositories. Only tiny.Q4_K_M.gguf is a model."""
    small = bytes(range(256)) * 40
    return {
        "ada/tiny-GGUF": {
            "README.md": b"# Tiny",
            "tiny.Q4_K_M.gguf": bundled_model_path().read_bytes(),
            "tiny.Q8_0.gguf": small,
            "mmproj-tiny-f16.gguf": small,
        },
        "ada/parts-GGUF": {f"BF16/parts-BF16-0000{i}-of-00002.gguf": small[i:] for i in (1, 2)},
        "ada/empty": {"README.md": b""},
    }
