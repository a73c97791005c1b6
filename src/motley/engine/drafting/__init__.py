"""Speculation: drafters guess the next tokens of requests, and one step computes and checks several of them.

    speculator.propose(scheduler)     drafts for the next step: which requests, how many tokens each
    speculator.note_draft(…)          how many of them were right
    speculator.note_step(…)           what the step took

A token is chosen by the request's own sampler in any case, and a draft only decides how many tokens one step gives: the
text is the same with every drafter, and without one.
"""

from motley.engine.drafting.chain_lookahead import ChainLookahead
from motley.engine.drafting.draft import Draft, Drafter
from motley.engine.drafting.forced import Forced
from motley.engine.drafting.lookahead import Lookahead
from motley.engine.drafting.lookup import Lookup
from motley.engine.drafting.speculator import Speculator

__all__ = ["ChainLookahead", "Draft", "Drafter", "Forced", "Lookahead", "Lookup", "Speculator"]
