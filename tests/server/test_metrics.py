"""/metrics: what is counted of an answer."""

from __future__ import annotations

from motley.server.jobs import End
from motley.server.metrics import Metrics


def end(n_drafts: int, n_drafted: int, n_accepted: int) -> End:
    return End(
        choice=0,
        reason="stop",
        stop=None,
        n_prompt=5,
        n_cached=0,
        n_new=40,
        queued_seconds=0.0,
        prompt_seconds=0.1,
        new_seconds=0.4,
        n_preemptions=0,
        n_retries=0,
        id_slot=0,
        error=None,
        n_drafts=n_drafts,
        n_drafted=n_drafted,
        n_accepted=n_accepted,
    )


def test_drafts_are_counted_and_not_the_requests_that_had_any() -> None:
    metrics = Metrics()
    for each in (end(4, 28, 20), end(0, 0, 0), end(3, 3, 1)):
        metrics.count(each)
    lines = metrics.render({}, n_busy=0, n_deferred=0).splitlines()
    assert "llamacpp:spec_decode_num_drafts_total 7" in lines
    assert "llamacpp:spec_decode_num_draft_tokens_total 31" in lines
    assert "llamacpp:spec_decode_num_accepted_tokens_total 21" in lines
