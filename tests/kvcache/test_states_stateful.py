"""Random operations on a cache with recurrent states, beside a naive model of the bytes: a slot is the tokens that its
state includes, a ring the tokens whose inputs it has. No sequence ever reads another one's past.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec
from motley.kvcache.states import NO_SLOT, StateSpec, StateTable
from thorough import examples

Tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
STATES = 1  # the number of the group


class StateMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}
        self.slots: dict[int, list[int]] = {}
        self.rings: dict[tuple[int, int], tuple[int, int]] = {}  # (ring, place) → (position, token)

    @initialize(
        size=st.sampled_from([2, 4]),
        n_slots=st.integers(1, 5),
        n_rings=st.integers(0, 3),
        n_pending=st.integers(1, 4),
        n_blocks=st.integers(4, 30),
        every=st.sampled_from([5, 100]),
    )
    def make(self, size: int, n_slots: int, n_rings: int, n_pending: int, n_blocks: int, every: int) -> None:
        spec = StateSpec("states", n_slots, n_rings, n_pending, every)
        self.n_pending = n_pending
        self.cache = CacheManager([GroupSpec("full", n_blocks), spec], size)

    def table(self, seq: int) -> StateTable:
        return self.cache.states([seq], STATES)[0]

    def past(self, seq: int) -> list[int]:
        """What the sequence's state and its ring say that its tokens are."""
        table, n_tokens = self.table(seq), len(self.texts[seq])
        text = [] if table.slot == NO_SLOT else list(self.slots[table.slot])
        assert len(text) == table.n_folded
        for position in range(table.n_folded, n_tokens):
            stored, token = self.rings[table.ring, position % self.n_pending]
            assert stored == position, "a ring has lost a token"
            text.append(token)
        return text

    @rule(
        target=sequences, tokens=Tokens, share=st.data(), checkpoints=st.lists(st.integers(1, 13), max_size=2)
    )
    def open(self, tokens: list[int], share: Any, checkpoints: list[int]) -> int:
        """A prompt that may begin like a sequence that is there."""
        if self.texts and share.draw(st.booleans()):
            tokens = self.texts[share.draw(st.sampled_from(sorted(self.texts)))] + tokens
        found = self.cache.open(tokens, checkpoints=tuple(sorted(checkpoints)))
        self.texts[found.seq] = tokens[: found.n_cached]
        assert self.past(found.seq) == tokens[: found.n_cached], "a hit on another text's state"
        rest = tokens[found.n_cached :]
        while rest and (n_run := self.run_batch(found.seq, rest)):
            rest = rest[n_run:]
        return found.seq

    @rule(seq=sequences, tokens=Tokens, n_uncertain=st.integers(0, 4), n_rejected=st.integers(0, 4))
    def run(self, seq: int, tokens: list[int], n_uncertain: int, n_rejected: int) -> None:
        if seq in self.texts:
            self.run_batch(seq, tokens, n_uncertain, n_rejected)

    @rule(seq=sequences, tokens=Tokens)
    def run_all(self, seq: int, tokens: list[int]) -> None:
        while seq in self.texts and tokens and (n_run := self.run_batch(seq, tokens)):
            tokens = tokens[n_run:]

    def run_batch(self, seq: int, tokens: list[int], n_uncertain: int = 0, n_rejected: int = 0) -> int:
        """Run tokens up to the next checkpoint, and return how many; 0: there is no room."""
        tokens = tokens[: self.cache.n_before_checkpoint(seq, len(tokens))]
        n_uncertain = min(n_uncertain, len(tokens) - 1, self.cache.max_uncertain)
        text = self.texts[seq]
        before = self.cache.stats()
        if self.cache.reserve(seq, len(tokens), n_uncertain=n_uncertain) is None:
            assert self.cache.stats() == before
            return 0
        table = self.table(seq)
        everything = self.past(seq) + tokens  # what the batch computes with
        assert everything == text + tokens
        self.slots[table.next_slot] = everything[: table.next_folded]
        for position in range(table.next_folded, len(everything)):
            self.rings[table.next_ring, position % self.n_pending] = position, everything[position]
        kept = tokens[: len(tokens) - min(n_rejected, n_uncertain)]
        self.cache.commit(seq, kept)
        text += kept
        return len(tokens)

    @rule(seq=sequences)
    def only_reserve(self, seq: int) -> None:
        if seq in self.texts:
            self.cache.reserve(seq, 1)

    @rule(target=sequences, seq=sequences)
    def fork(self, seq: int) -> int:
        if seq not in self.texts:
            return seq
        twin = self.cache.fork(seq)
        self.texts[twin] = list(self.texts[seq])
        return twin

    @rule(seq=sequences, n_tokens=st.integers(0, 40))
    def truncate(self, seq: int, n_tokens: int) -> None:
        if seq in self.texts and n_tokens <= len(self.texts[seq]) and self.cache.can_truncate(seq, n_tokens):
            self.cache.truncate(seq, n_tokens)
            del self.texts[seq][n_tokens:]

    @rule(target=sequences, tokens=Tokens)
    def restore(self, tokens: list[int]) -> int:
        before = self.cache.stats()
        restored = self.cache.restore(tokens)
        if restored is None:
            assert self.cache.stats() == before
            return -1
        (slot,) = restored.slots[STATES]
        self.slots[slot] = list(tokens)
        self.cache.commit(restored.seq, tokens)
        self.texts[restored.seq] = list(tokens)
        return restored.seq

    @rule(seq=consumes(sequences), has_failed=st.booleans())
    def free(self, seq: int, has_failed: bool) -> None:
        if seq not in self.texts:
            return
        table = self.table(seq)
        if has_failed and table.next_slot != NO_SLOT:
            self.slots[table.next_slot] = [-1]  # the batch has written something
        self.cache.free(seq, copies_done=not has_failed)
        del self.texts[seq]

    @rule(tokens=Tokens)
    def unpublish(self, tokens: list[int]) -> None:
        self.cache.unpublish(tokens)

    @rule()
    def clear(self) -> None:
        self.cache.clear_prefixes()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            for seq, text in self.texts.items():
                assert self.past(seq) == text


test_no_sequence_reads_the_past_of_another = StateMachine.TestCase
test_no_sequence_reads_the_past_of_another.settings = settings(
    max_examples=examples(150), stateful_step_count=50, deadline=None
)
