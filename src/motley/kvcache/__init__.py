"""The paged KV cache: which block holds which token (pure Python), and the arenas that hold the bytes."""
