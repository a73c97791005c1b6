"""Running batches on a crew: split + plans + cache + batch → logits."""

from motley.runtime.batch import Batch, Chunk
from motley.runtime.budget import device_needs, room_for_cache, show_bytes
from motley.runtime.caching import CacheConfig, CachePlan, plan_cache
from motley.runtime.crew import Crew, make_crew, parse_bytes
from motley.runtime.loading import Progress
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit

__all__ = [
    "Batch",
    "CacheConfig",
    "CachePlan",
    "Chunk",
    "Crew",
    "ModelSplit",
    "Progress",
    "Runner",
    "device_needs",
    "make_crew",
    "parse_bytes",
    "plan_cache",
    "room_for_cache",
    "show_bytes",
]
