"""A decode batch as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from motley.backends.cuda.paged import Place
from motley.graph import Tensor

Execute = Callable[[Mapping[Tensor, Any], dict[int, Place]], tuple[torch.Tensor, ...]]


class Captured:
    """One decode batch as a CUDA graph, with the memory that its inputs are copied to."""

    def __init__(
        self,
        execute: Execute,
        given: Mapping[Tensor, Any],
        places: dict[int, Place],
    ) -> None:
        self._given = dict(given)
        self._places = places
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._outputs = execute(self._given, places)

    def fits(self, places: Mapping[int, Place]) -> bool:
        return all(place.is_decode for place in places.values())

    def replay(self, given: Mapping[Tensor, Any], places: Mapping[int, Place]) -> tuple[torch.Tensor, ...]:
        for node, value in given.items():
            if isinstance(value, torch.Tensor):
                self._given[node].copy_(value)
        for number, place in places.items():
            if place is not self._places[number]:
                self._places[number].copy_from(place)
        self._graph.replay()
        return self._outputs
