"""Downloads that do not go as planned: interrupted, redirected, refused, described wrongly, without a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_machine import Machine, repositories
from stand_in_hub import StandInHub
from terminal import Terminal

PORTION = 10 << 20  # bytes that huggingface_hub writes at a time


def described(*files: dict[str, object]) -> bytes:
    """What a hub says about a repository with these files."""
    return json.dumps({"id": "ada/tiny-GGUF", "sha": "main", "siblings": files}).encode()


def test_a_terminal_shows_the_progress_and_ctrl_c_stops_a_download_that_goes_on_later(
    machine: Machine,
) -> None:
    machine.hub.pause_after = PORTION + 1000
    with Terminal("pull", "ada/tiny-GGUF", **machine.environment()) as terminal:
        terminal.expect(r"Downloading ada/tiny-GGUF")
        terminal.expect(r"10\.0/1\d\.\d MiB")
        terminal.interrupt()
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text
        assert terminal.seen.count("\x1b[?25l") == terminal.seen.count("\x1b[?25h")  # the cursor is back
    machine.hub.go_on.set()
    (outcome,) = machine.motley(["pull", "ada/tiny-GGUF"])
    assert outcome.code == 0, outcome.stderr
    whole = machine.hub.repos["ada/tiny-GGUF"]["tiny.Q4_K_M.gguf"]
    assert Path(outcome.stdout.strip()).read_bytes() == whole
    assert f"bytes={PORTION}-" in [wanted for _, _, wanted, _ in machine.hub.requests]


def test_an_interrupted_download_can_be_removed(machine: Machine) -> None:
    part = machine.folder / "hub" / "models--ada--tiny-GGUF" / "blobs" / f"{'0' * 64}.motley-part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(2048))
    removed, gone = machine.motley(["rm", "ada/tiny-GGUF"], ["rm", "ada/tiny-GGUF"])
    assert removed.stderr == "Deleted ada/tiny-GGUF: 2.0 KiB.\n"
    assert not part.exists()
    assert "ada/tiny-GGUF is not in the cache folder" in gone.stderr


def test_a_redirection_is_followed_and_the_token_stays_with_the_hub(machine: Machine) -> None:
    with StandInHub(repositories()) as cdn:
        machine.hub.cdn = cdn
        (outcome,) = machine.motley(["pull", "ada/tiny-GGUF:Q8_0", "--hf-token", "hf_secret"])
    assert outcome.code == 0, outcome.stderr
    assert Path(outcome.stdout.strip()).read_bytes() == cdn.repos["ada/tiny-GGUF"]["tiny.Q8_0.gguf"]
    ours = [request for request in machine.hub.requests if "ada/" in request[1]]
    assert {sent for *_, sent in ours} == {"Bearer hf_secret"}
    assert {sent for *_, sent in cdn.requests} == {None}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"<html>", "sent an answer about ada/tiny-GGUF that is not a hub's"),
        (b"[1, 2]", "sent an answer about ada/tiny-GGUF that is not a hub's"),
        (described({"rfilename": "../../x.Q4_K_M.gguf", "size": 10}), "ada/tiny-GGUF has no GGUF files"),
        (described({"rfilename": "/x.gguf", "size": 10}), "ada/tiny-GGUF has no GGUF files"),
        (described({"rfilename": "x.gguf", "size": 10**18}), "ada/tiny-GGUF needs 909494.7 TiB"),
        (described({"rfilename": "\x1b[2J.gguf", "size": 1}, {"rfilename": "\x1b]0;x\x07.gguf"}), "\\x1b[2J"),
    ],
)
def test_what_a_hub_says_is_not_trusted(machine: Machine, answer: bytes, said: str) -> None:
    machine.hub.answer = answer
    machine.hub.lacks = frozenset({"\x1b[2J.gguf"})
    (outcome,) = machine.motley(["pull", "ada/tiny-GGUF"])
    assert outcome.code == 2
    assert said in outcome.stderr
    assert "\x1b" not in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not list(machine.folder.parent.rglob("*.gguf"))


def test_a_checksum_is_not_the_name_of_any_file(machine: Machine, tmp_path: Path) -> None:
    machine.hub.checksums["tiny.Q8_0.gguf"] = "../../../../../evil"  # beside the cache folder
    (outcome,) = machine.motley(["pull", "ada/tiny-GGUF:Q8_0"])
    assert outcome.code == 2
    assert "error: the hub describes ada/tiny-GGUF with '../../../../../evil'" in outcome.stderr
    assert not list(tmp_path.rglob("evil"))


def test_a_file_that_is_not_there_is_named(machine: Machine) -> None:
    machine.hub.lacks = frozenset({"tiny.Q8_0.gguf"})
    (outcome,) = machine.motley(["pull", "ada/tiny-GGUF:Q8_0"])
    assert outcome.code == 2
    assert "error: the hub has no file tiny.Q8_0.gguf in ada/tiny-GGUF" in outcome.stderr


def test_a_cache_folder_that_cannot_be_one_is_named(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (outcome,) = machine.motley(["pull", "ada/tiny-GGUF:Q8_0"], HF_HOME=str(tmp_path / "file"))
    assert outcome.code == 2
    assert "Not a directory" in outcome.stderr
    assert "hint: HF_HOME names another folder" in outcome.stderr
    assert "cannot be reached" not in outcome.stderr
