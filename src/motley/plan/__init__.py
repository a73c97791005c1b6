"""From one device's graph to something to run: kernels chosen, activation memory laid out."""

from motley.plan.device_plan import DevicePlan, Step
from motley.plan.kernels import Kernel, Launch, choose_kernel
from motley.plan.memory import MemoryLayout, base_of, lay_out, owns_memory

__all__ = [
    "DevicePlan",
    "Kernel",
    "Launch",
    "MemoryLayout",
    "Step",
    "base_of",
    "choose_kernel",
    "lay_out",
    "owns_memory",
]
