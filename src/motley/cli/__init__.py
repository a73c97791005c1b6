"""The `motley` command: reads flags, calls `motley.LLM` and prints."""

from motley.cli.commands import app, main

__all__ = ["app", "main"]
