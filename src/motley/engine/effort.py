"""How much of the model a request uses: how many experts for each token, how many layers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from motley.engine.checks import shorten
from motley.errors import RequestError
from motley.integers import as_int


@dataclass(frozen=True)
class Effort:
    """The experts and layers of a request; 0 means the number in the model file.

    Requests of different effort compute different keys and values.
    """

    n_experts: int = 0  # experts that each token uses
    n_layers: int = 0  # the first `n_layers` run, then the output norm and matrix

    @property
    def salt(self) -> bytes:
        """Part of the prefix key, so that prefix hits are only blocks that were computed with the same effort."""
        return b"" if self == FULL else f"experts {self.n_experts}, layers {self.n_layers}".encode()


FULL = Effort()


def prefix_salt(effort: Effort, cache_salt: str | None) -> bytes:
    """Part of the prefix keys of a request: what changes K/V, and what keeps its blocks apart from those of others."""
    if cache_salt is None:
        return effort.salt
    return effort.salt + b"; salt " + cache_salt.encode(errors="surrogatepass")


class Efforts:
    """The efforts that a model allows, and the default for requests."""

    def __init__(self, n_layers: int, n_experts: int = 0, n_expert_used: int = 0, n_usable: int = 0) -> None:
        """`n_experts`: of a layer, 0 for a dense model. `n_expert_used`: experts of each token in the model file.
        `n_usable`: the most that one token can use, where the router chooses groups of experts first; 0: all.
        """
        self._n_layers = n_layers
        self._n_experts = n_experts
        self._n_expert_used = n_expert_used
        self._n_usable = n_usable or n_experts
        self.default = FULL

    def choose(self, n_expert_used: int | None = None, n_layer_exit: int | None = None) -> Effort:
        """The effort for these numbers (None: the default); RequestError for anything that the model does not allow."""
        n_experts, n_layers = self.default.n_experts, self.default.n_layers
        if n_expert_used is not None:
            if not self._n_experts:
                raise RequestError(
                    f"n_expert_used={shorten(n_expert_used)} is not possible: the model has no experts",
                    hint="leave out n_expert_used (--n-expert-used)",
                )
            what = f"the model has {self._n_experts} experts"
            if self._n_usable < self._n_experts:
                what += f", of which a token can use {self._n_usable}"
            number = _checked("n_expert_used", n_expert_used, self._n_usable, what)
            n_experts = 0 if number == self._n_expert_used else number
        if n_layer_exit is not None:
            number = _checked(
                "n_layer_exit", n_layer_exit, self._n_layers, f"the model has {self._n_layers} layers"
            )
            n_layers = 0 if number == self._n_layers else number
        return Effort(n_experts, n_layers)


def _checked(name: str, value: object, maximum: int, what: str) -> int:
    number = as_int(value)
    if number is None or not 1 <= number <= maximum:
        raise RequestError(
            f"{name}={shorten(value)} is not possible: {what}",
            hint=f"{name} must be an integer from 1 to {maximum}",
        )
    return number
