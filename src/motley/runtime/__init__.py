"""Running batches: plan + cache + batch → logits."""

from motley.runtime.batch import Batch, Chunk
from motley.runtime.crew import Crew, make_crew
from motley.runtime.loading import Progress
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit

__all__ = ["Batch", "Chunk", "Crew", "ModelSplit", "Progress", "Runner", "make_crew"]
