"""Running batches on a crew: split + plans + cache + batch → logits."""

from motley.runtime.batch import Batch, Chunk, PlacedBatch
from motley.runtime.cache_report import CacheFigures, DeviceFigures, KVStats, cache_figures
from motley.runtime.caching import CacheConfig, CachePlan
from motley.runtime.crew import Crew, make_crew
from motley.runtime.fitting import MAX_LOGIT_ROWS, CacheFit, default_context, fit_cache, split_model
from motley.runtime.loading import Progress
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit
from motley.runtime.steady import SteadyRun

__all__ = [
    "MAX_LOGIT_ROWS",
    "Batch",
    "CacheConfig",
    "CacheFigures",
    "CacheFit",
    "CachePlan",
    "Chunk",
    "Crew",
    "DeviceFigures",
    "KVStats",
    "ModelSplit",
    "PlacedBatch",
    "Progress",
    "Runner",
    "SteadyRun",
    "cache_figures",
    "default_context",
    "fit_cache",
    "make_crew",
    "split_model",
]
