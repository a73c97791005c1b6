"""A worker for `peers`: llama.cpp, through llama-cpp-python's low-level API. Does not import Motley."""

from __future__ import annotations

import ctypes

import llama_cpp as lib
from peer_llama_state import stretch
from peer_worker import serve, some_tokens

_COMPUTED = 512  # tokens of a deep context
_SEQUENCE = 0


class LlamaCpp:
    def __init__(self, model: str, n_threads: int, n_ctx: int, cache_type: str, flash: bool) -> None:
        params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(model.encode(), params)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, n_ctx, 512
        context.n_threads = context.n_threads_batch = n_threads
        context.type_k = context.type_v = getattr(lib, f"GGML_TYPE_{cache_type.upper()}")
        context.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context = lib.llama_init_from_model(self._model, context)
        self._memory = lib.llama_get_memory(self._context)
        self.about = lib.llama_print_system_info().decode()
        self._deep: dict[int, bytes] = {}  # by depth

    def begin(self, depth: int) -> None:
        lib.llama_memory_clear(self._memory, True)
        if depth:
            if depth not in self._deep:
                self.feed(some_tokens(min(depth, _COMPUTED)))
                self._deep[depth] = stretch(self._saved(), depth)
            self._load(self._deep[depth])
        last = lib.llama_memory_seq_pos_max(self._memory, _SEQUENCE)
        if last != depth - 1:
            raise RuntimeError(f"the context ends at position {last}, not {depth - 1}")

    def feed(self, tokens: list[int]) -> None:
        ids = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(self._context, lib.llama_batch_get_one(ids, len(ids))):
            raise RuntimeError("llama_decode failed")
        lib.llama_get_logits(self._context)  # waits for the result

    def _saved(self) -> bytes:
        state = (ctypes.c_uint8 * lib.llama_state_seq_get_size(self._context, _SEQUENCE))()
        if lib.llama_state_seq_get_data(self._context, state, len(state), _SEQUENCE) != len(state):
            raise RuntimeError("the sequence could not be saved")
        return bytes(state)

    def _load(self, state: bytes) -> None:
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if lib.llama_state_seq_set_data(self._context, data, len(state), _SEQUENCE) != len(state):
            raise RuntimeError("the stretched sequence could not be loaded")


if __name__ == "__main__":
    serve(LlamaCpp)
