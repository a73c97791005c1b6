"""A worker for `peers`: Motley."""

from __future__ import annotations

from peer_worker import serve

from motley import LLM


class Motley:
    def __init__(self, model: str, n_threads: int, n_ctx: int, cache_type: str) -> None:
        self._llm = LLM(
            model,
            n_ctx=n_ctx,
            n_threads=n_threads,
            cache_type_k=cache_type,
            cache_type_v=cache_type,
            n_parallel=1,
            spec="off",
        )
        self._sequence = self._llm.raw_sequence()
        self.about = "; ".join(self._llm.details)

    def begin(self, depth: int) -> None:
        self._sequence.close()
        self._sequence = self._llm.raw_sequence()
        self._sequence.fill_with_random(depth)

    def feed(self, tokens: list[int]) -> None:
        self._sequence.feed(tokens, n_outputs=1)


if __name__ == "__main__":
    serve(Motley)
