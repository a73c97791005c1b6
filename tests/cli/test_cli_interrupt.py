"""Ctrl-C while a command starts: no trace, whatever it was doing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from terminal import Terminal

ANSWER = ("run", "-t", "1", "-p", "Hello", "--ignore-eos", "--context-shift", "-n", "-1")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rich.text", "numpy", "torch.fx"])
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "motley", *ANSWER]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(f" {module}"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (-signal.SIGINT, 130)
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest


@pytest.mark.parametrize("sight", ["Loading", r"loaded \d+"])
def test_ctrl_c_while_the_model_is_loaded_or_answers(sight: str) -> None:
    with Terminal(*ANSWER) as terminal:
        terminal.expect(sight)
        terminal.interrupt()
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text
        assert "KeyboardInterrupt" not in terminal.text
        assert terminal.seen.count("\x1b[?25l") == terminal.seen.count(
            "\x1b[?25h"
        )  # the cursor is shown again
