"""Whether a file's tensors and its metadata describe the same model."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from motley.errors import ModelError
from motley.gguf import ModelSpec
from motley.graph import Graph
from motley.graph.ops import Weight
from motley.graph.roles import QUERY_HEADS, ROUTER
from motley.models.params import INCOMPLETE, read_count

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_MAX_LISTED = 3  # names in a message
# Tensors of layers that have no influence on the answer: older files store constants of RoPE.
_CONSTANTS = ("attn_rot_embd.weight", "rope_freqs.weight")


def count_nextn(spec: ModelSpec, n_layers: int) -> int:
    """The number of multi-token prediction layers after the first `n_layers`; 0 if the file leaves them out.

    ModelError if layers are missing, or if such a layer is an ordinary one, which would have no part in answers.
    """
    blocks_key, nextn_key = (f"{spec.architecture}.{key}" for key in ("block_count", "nextn_predict_layers"))
    n_blocks = read_count(spec, blocks_key)
    layers = {int(found[1]) for name in spec.tensors if (found := _LAYER.match(name))}
    n_found = max(layers, default=-1) + 1
    if n_found == n_layers:
        return 0
    if n_found != n_blocks:
        raise ModelError(
            f"{spec.path}: {blocks_key} is {n_blocks}, but the file has tensors of {n_found} layers",
            hint=INCOMPLETE,
        )
    n_nextn = n_blocks - n_layers
    for index in range(n_layers, n_blocks):
        if (name := f"blk.{index}.nextn.eh_proj.weight") not in spec.tensors:
            raise ModelError(
                f"{spec.path}: the tensor {name!r} is missing, but {nextn_key} is {n_nextn}, so layer {index} should "
                "predict further tokens",
                hint=INCOMPLETE,
            )
    return n_nextn


def unused_tensors(spec: ModelSpec, graph: Graph, n_layers: int) -> tuple[str, ...]:
    """Names of tensors that the model does not read. ModelError if a layer has some: answers would be wrong.

    `graph`: the model's. Layers after the first `n_layers` (multi-token prediction) are not counted.
    """
    used = {node.op.source for node in graph.weights if isinstance(node.op, Weight)}
    rest = [name for name in spec.tensors if name not in used and not name.startswith("rope_")]
    in_layers = [name for name in rest if _matters(name, n_layers)]
    if in_layers:
        raise ModelError(
            f"{spec.path}: {spec.architecture!r} models have no {_listed(in_layers)}: without them the answers would "
            "be wrong",
            hint="this variant of the architecture is not supported",
        )
    return tuple(name for name in rest if not _LAYER.match(name))


def check_values(spec: ModelSpec, graph: Graph) -> None:
    """ModelError if a router, a norm, a bias or a sink has a NaN or an infinity.

    A NaN in a bias that only affects the choice of experts would change answers without a sign. Large matrices are not
    read here: a NaN there makes logits NaN, and requests fail. A bias of a router, or an attention sink, may be -inf:
    that expert is never chosen, and there is no sink.
    """
    for node in graph.weights:
        assert isinstance(node.op, Weight)
        role, is_vector = node.op.role, len(node.shape) == 1
        if role.group != ROUTER and not is_vector:
            continue
        values = spec.tensor(node.op.source).unpack()
        may_be_negative = is_vector and (role.group == ROUTER or role.units == (QUERY_HEADS,))
        is_good = (values < torch.inf) if may_be_negative else values.isfinite()
        if not is_good.all():
            n_bad = int((~is_good).sum())
            raise ModelError(
                f"{spec.path}: {n_bad} of {values.numel()} values of the tensor {node.op.source!r} are NaN or infinite",
                hint="the file was damaged or converted wrongly: download or convert it again",
            )


def unused_notice(names: Collection[str]) -> str | None:
    """The sentence about tensors that are not read."""
    return f"the file has tensors that are not used: {_listed(names)}" if names else None


def _matters(name: str, n_layers: int) -> bool:
    found = _LAYER.match(name)
    return found is not None and int(found[1]) < n_layers and found[2] not in _CONSTANTS


def _listed(names: Collection[str]) -> str:
    shown = [repr(name) for name in names][:_MAX_LISTED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
