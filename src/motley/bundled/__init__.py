"""The small models that ship with Motley, and the recall drill that they were trained for. See MODEL_CARD.md."""

from __future__ import annotations

from pathlib import Path

from motley.bundled.recall import RecallPrompt, is_recalled, make_recall_prompts

__all__ = [
    "RecallPrompt",
    "bundled_draft_path",
    "bundled_experts_path",
    "bundled_model_path",
    "is_recalled",
    "make_recall_prompts",
    "measuring_model_path",
]

FOLDER = Path(__file__).parent


def bundled_model_path() -> Path:
    """The GGUF file of the model that `motley run` opens by default."""
    return FOLDER / "motley-15m-q8_0.gguf"


def bundled_draft_path() -> Path:
    """The GGUF file of a model a tenth as large with the same vocabulary, for speculative drafts."""
    return FOLDER / "motley-draft-1m-q8_0.gguf"


def bundled_experts_path() -> Path:
    """The GGUF file of a mixture of experts (qwen3moe) with the same vocabulary."""
    return FOLDER / "motley-experts-9m-q8_0.gguf"


def measuring_model_path() -> Path:
    """The GGUF file of the older model, which knows books best: cache types are tested on them with it."""
    return FOLDER / "motley-10m-q8_0.gguf"
