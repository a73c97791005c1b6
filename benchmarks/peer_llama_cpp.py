"""A worker for `peers`: llama.cpp, through llama-cpp-python's low-level API. Needs nothing of Motley."""

from __future__ import annotations

import json
import sys
import time

import llama_cpp as lib


class Worker:
    def __init__(self, model: str, n_threads: int, n_ctx: int, cache_type: str, flash: bool) -> None:
        started = time.perf_counter()
        params = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(model.encode(), params)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, 512, 512
        context.n_threads = context.n_threads_batch = n_threads
        context.type_k = context.type_v = getattr(lib, f"GGML_TYPE_{cache_type.upper()}")
        context.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self.context = lib.llama_init_from_model(self.model, context)
        self.seconds_to_load = time.perf_counter() - started

    def feed(self, n_tokens: int) -> float:
        """Seconds for one pass."""
        tokens = (lib.llama_token * n_tokens)(*([1] * n_tokens))
        started = time.perf_counter()
        if lib.llama_decode(self.context, lib.llama_batch_get_one(tokens, n_tokens)):
            raise RuntimeError("llama_decode failed")
        lib.llama_get_logits(self.context)  # waits for the result
        return time.perf_counter() - started

    def clear(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)


def main() -> None:
    options = json.loads(sys.argv[1])
    worker = Worker(**options)
    print(json.dumps({"load": worker.seconds_to_load}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        worker.clear()
        for size in request["before"]:
            worker.feed(size)
        seconds = [worker.feed(request["n_tokens"]) for _ in range(request["times"])]
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
