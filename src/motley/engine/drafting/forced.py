"""The grammar drafter: tokens that a constraint forces, such as the names of a JSON schema's properties."""

from __future__ import annotations

from collections.abc import Sequence

from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.request import Request


class Forced:
    """Drafts of constrained requests: their text where only one can follow.

    They are drafts, not facts: the model may write the same text with other tokens, and then keeps to these.
    """

    name = "grammar"
    priors = (0.9,)
    is_free = True
    is_usual = True
    writes_cache = False

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(_forced(ask.request)[: ask.n_max], self.name) for ask in asks]

    def may_draft(self, request: Request) -> bool:
        """False, as this is not known before the token: launching a step ahead is worth more than waiting for it."""
        return False


def _forced(request: Request) -> tuple[int, ...]:
    if request.matcher is None:
        return ()
    try:
        return tuple(request.matcher.forced())
    except Exception:  # the request fails later, when its mask is computed
        return ()
