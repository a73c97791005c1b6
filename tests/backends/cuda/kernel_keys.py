"""Prints Triton's key of each kernel, which its compiled code is kept under. A process of its own: needs
TRITON_INTERPRET=0. With an argument, in a process without torch, as the kernels are compiled ahead.
"""

from __future__ import annotations

import json
import sys

if len(sys.argv) > 1:
    from motley.without_torch import stand_in

    stand_in()

from triton.runtime import JITFunction

from motley.backends.cuda.compile_worker import import_kernels

import_kernels()
keys = {}
for name, module in list(sys.modules.items()):
    if name.startswith("motley.backends.cuda.kernels."):
        found = {key: value for key, value in vars(module).items() if isinstance(value, JITFunction)}
        keys |= {f"{name}.{key}": function.cache_key for key, function in found.items()}
print(json.dumps([keys, "torch._C" in sys.modules]))
