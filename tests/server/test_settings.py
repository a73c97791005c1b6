"""Flags of `motley serve` with values that it cannot use: refused at once, before a process or a model is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from motley.cli import app
from motley.errors import ConfigError, TemplateError
from motley.server import supervisor
from motley.server.settings import ServerSettings
from motley.text.named_templates import NAMED, named_template


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("--port", "99999"), "--port '99999' must be at least 0 and at most 65535", "--help"),
        (("--pooling", "max"), "--pooling 'max' is unknown", "mean, last, cls, none"),
        (("--reasoning", "yes"), "--reasoning 'yes' is unknown", "on, off, auto"),
        (("--reasoning-format", "xml"), "--reasoning-format 'xml' is unknown", "none, deepseek"),
        (("-n", "-5"), "-n -5 is not possible", ">= -1"),
        (("--slot-save-path", "no/such"), "--slot-save-path no/such is not a folder", "make the folder"),
        (("--api-key-file", "no/such"), "cannot read no/such: No such file", "takes a text file"),
        (("--chat-template-file", "."), "cannot read .: Is a directory", "takes a text file"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str, hint: str
) -> None:
    monkeypatch.setattr(supervisor, "serve", lambda settings: pytest.fail("it was started"))
    result = CliRunner().invoke(app, ["serve", *args])
    assert result.exit_code == 2
    error_line, hint_line = result.stderr.splitlines()
    assert error_line.startswith(f"error: {message}")
    assert hint in hint_line


def test_values_that_can_be_used(tmp_path: Path) -> None:
    for pooling in (None, "mean", "none"):
        for reasoning_format in ("none", "auto", "deepseek"):
            settings = ServerSettings(
                Path("m.gguf"), pooling=pooling, reasoning_format=reasoning_format, slot_save_path=tmp_path
            )
            assert settings.n_predict == -1
    with pytest.raises(ConfigError):
        ServerSettings(Path("m.gguf"), slot_save_path=tmp_path / "absent")


def test_a_misspelled_template_is_not_a_template() -> None:
    with pytest.raises(TemplateError, match="there is no chat template 'chatlm'"):
        named_template("chatlm")
    assert named_template("chatml") == NAMED["chatml"]
    assert named_template("{{ messages }}") == ("{{ messages }}", ())
