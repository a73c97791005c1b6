"""A worker for `peers`: Motley."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    options = json.loads(sys.argv[1])
    from motley import LLM  # after the arguments are known to be right: importing torch takes seconds

    started = time.perf_counter()
    llm = LLM(
        options["model"],
        n_ctx=options["n_ctx"],
        n_threads=options["n_threads"],
        cache_type_k=options["cache_type"],
        cache_type_v=options["cache_type"],
        n_parallel=1,
    )
    print(json.dumps({"load": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds = []
        with llm.bare_sequence() as sequence:
            for size in request["before"]:
                sequence.feed([1] * size, n_outputs=1)
            for _ in range(request["times"]):
                begun = time.perf_counter()
                sequence.feed([1] * request["n_tokens"], n_outputs=1)
                seconds.append(time.perf_counter() - begun)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
