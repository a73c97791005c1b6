"""What is said about kernels that were compiled for a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmUp:
    """The compiled kernels: their names with core-seconds each, and the wall-clock seconds in all."""

    kernels: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    n_others: int = 0  # kernels that are still being compiled, as far as they are known

    def __str__(self) -> str:
        if not self.kernels:
            at_first_use = "compiled at their first use" if self.failures else "all compiled before"
            return f"kernels: {at_first_use}"
        total = sum(seconds for _, seconds in self.kernels)
        others = f"; {self.n_others} others are being compiled" if self.n_others else ""
        return f"kernels: {len(self.kernels)} compiled in {self.seconds:.1f} s ({total:.0f} s of one core){others}"

    @property
    def details(self) -> list[str]:
        """A line for each name, the slowest first; none if nothing was compiled."""
        names = Counter(name for name, _ in self.kernels)
        seconds = {name: sum(s for other, s in self.kernels if other == name) for name in names}
        slowest_first = sorted(names, key=lambda name: -seconds[name])
        return [f"  {names[name]} × {name}, {seconds[name]:.2f} s" for name in slowest_first]

    @property
    def notices(self) -> list[str]:
        """A sentence about each kernel that failed."""
        return [f"not compiled: {failure}" for failure in self.failures]
