"""From one device's graph to something to run: stages, a kernel for each, activation memory laid out."""

from motley.plan.device_plan import DevicePlan, Step, activation_bytes
from motley.plan.fusion import is_given, is_view, without_views
from motley.plan.kernels import Kernel, Launch, LaunchKernel, choose_kernel
from motley.plan.memory import Buffer, MemoryLayout, base_of, lay_out, owns_memory, value_buffers
from motley.plan.rules import fuse
from motley.plan.stages import (
    AttentionBlock,
    DeltaRule,
    Experts,
    Gate,
    GatedNorm,
    Linear,
    Norm,
    Part,
    Routing,
    Single,
    Stage,
)

__all__ = [
    "AttentionBlock",
    "Buffer",
    "DeltaRule",
    "DevicePlan",
    "Experts",
    "Gate",
    "GatedNorm",
    "Kernel",
    "Launch",
    "LaunchKernel",
    "Linear",
    "MemoryLayout",
    "Norm",
    "Part",
    "Routing",
    "Single",
    "Stage",
    "Step",
    "activation_bytes",
    "base_of",
    "choose_kernel",
    "fuse",
    "is_given",
    "is_view",
    "lay_out",
    "owns_memory",
    "value_buffers",
    "without_views",
]
