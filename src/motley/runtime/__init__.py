"""Running batches: plan + cache + batch → logits."""

from motley.runtime.batch import Batch, Chunk
from motley.runtime.runner import Progress, Runner

__all__ = ["Batch", "Chunk", "Progress", "Runner"]
