"""One device's plan as segments of steps between collectives, run on a thread of its own (see `joint` for more)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from motley.backends.base import Executable, Joint
from motley.backends.cuda.capture import Captured, GraphPool, Work
from motley.backends.cuda.joint import Crew
from motley.backends.cuda.lowering import Lowering, Stage
from motley.backends.cuda.segments import Segment, segments_of
from motley.backends.cuda.staging import Staged, Staging
from motley.backends.cuda.values import Values
