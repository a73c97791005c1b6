"""The Dockerfiles, by the rules of a linter: they cannot be built where the tests run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from motley.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
HADOLINT = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
FILES = ("Dockerfile", "Dockerfile.cuda")
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(words[0], words[1]) for line in joined.splitlines() if (words := line.split(None, 1))]


@pytest.mark.parametrize("name", FILES)
def test_a_dockerfile_keeps_a_linter_s_rules(name: str) -> None:
    found = instructions(name)
    assert {instruction for instruction, _ in found} <= KNOWN
    for image in (arguments.split()[0] for instruction, arguments in found if instruction == "FROM"):
        assert ":" in image
        assert not image.endswith(":latest")
    for command in (arguments for instruction, arguments in found if instruction == "RUN"):
        assert "sudo" not in command
        if "apt-get install" in command:
            assert "apt-get update &&" in command
            assert "-y --no-install-recommends" in command
            assert "rm -rf /var/lib/apt/lists/*" in command
        for pip in re.findall(r"pip (?:install|wheel)[^&]*", command):
            assert "--no-cache-dir" in pip
    users = [arguments for instruction, arguments in found if instruction == "USER"]
    assert users == ["1000"]  # not root, and a number: Kubernetes compares it
    assert [instruction for instruction, _ in found].index("USER") > len(found) - 6


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint, which has no wheel for this machine")
@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    command = [str(HADOLINT), "--no-color", str(ROOT / name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_dockerfile_copies_what_exists_and_starts_a_command_that_exists(name: str) -> None:
    found = instructions(name)
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for instruction, arguments in found:
        if instruction == "COPY":
            for source in arguments.split()[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}" in allowed
    (entry,) = [json.loads(arguments) for instruction, arguments in found if instruction == "ENTRYPOINT"]
    assert entry[0] == "motley"
    assert entry[1] in COMMANDS
