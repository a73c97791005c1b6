"""Drafts that are trees: alternative continuations, computed in one step. Imports no torch.

A tree is a list of drafted tokens and, for each, its *parent*: the index of the token before it, or ROOT for the
request's last token. Parents come before their children, so the first tokens of a tree are a tree, too. In a step the
request's last token is row 0, and token i of the draft is row i + 1. Without parents a draft is a chain.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = -1
Parents = tuple[int, ...]  # empty: a chain
MAX_ROWS = 64  # of a request in a step with a tree, its last token included


def depths(parents: Sequence[int]) -> list[int]:
    """The depth of each token: how many tokens of the draft lead to it, itself included."""
    found: list[int] = []
    for i, parent in enumerate(parents):
        assert ROOT <= parent < i, "a parent comes before its children"
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def row_masks(parents: Sequence[int], n_pending: int = 1) -> tuple[int, ...]:
    """For each row the bits of the rows that it sees, itself included. The draft comes after `n_pending` tokens."""
    masks = [(2 << i) - 1 for i in range(n_pending)]
    for i, parent in enumerate(parents):
        masks.append(masks[n_pending + parent] | 1 << (n_pending + i))
    return tuple(masks)


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == i - 1 for i, parent in enumerate(parents))


def child_of(tokens: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    """The index of the drafted token after `parent` that is `token`; None: there is none."""
    if not parents:
        after = parent + 1
        return after if after < len(tokens) and tokens[after] == token else None
    for i in range(parent + 1, len(parents)):
        if parents[i] == parent and tokens[i] == token:
            return i
    return None


def has_children(n_tokens: int, parents: Sequence[int], parent: int) -> bool:
    return parent in parents if parents else parent + 1 < n_tokens


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """The indices of the tokens that lead to a token, itself included, the first one first."""
    path = []
    while index != ROOT:
        path.append(index)
        index = parents[index] if parents else index - 1
    return path[::-1]


def cut(
    tokens: tuple[int, ...], parents: Parents, n_tokens: int, max_depth: int
) -> tuple[tuple[int, ...], Parents]:
    """The first `n_tokens` tokens that are not deeper than `max_depth`; without parents if they are a chain."""
    if not parents:
        return tokens[: min(n_tokens, max_depth)], ()
    numbers: dict[int, int] = {ROOT: ROOT}  # index of a kept token → its index among those
    kept: list[int] = []
    for i, depth in enumerate(depths(parents)):
        if depth <= max_depth and len(kept) < n_tokens:
            numbers[i] = len(kept)
            kept.append(i)
    new = tuple(numbers[parents[i]] for i in kept)
    return tuple(tokens[i] for i in kept), () if is_chain(new) else new
