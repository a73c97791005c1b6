"""The small model that ships with Motley, and the recall drill that it was trained for. See MODEL_CARD.md."""

from __future__ import annotations

from pathlib import Path

from motley.bundled.recall import RecallPrompt, is_recalled, make_recall_prompts

__all__ = ["RecallPrompt", "bundled_model_path", "is_recalled", "make_recall_prompts"]


def bundled_model_path() -> Path:
    """The GGUF file inside the installed package."""
    return Path(__file__).parent / "motley-10m-q8_0.gguf"
