"""llama-server for `serve_peer`, from the PyPI package xllamacpp, which contains it. Does not import Motley.

peer_llama_server.py MODEL THREADS PARALLEL CONTEXT: serves on a free port until it is ended.
"""

from __future__ import annotations

import sys
import time

import xllamacpp


def main() -> None:
    model, n_threads, n_parallel, n_ctx = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.n_parallel = n_parallel
    params.n_ctx = n_parallel * n_ctx  # here it is the context of all slots together
    params.port = 0
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", file=sys.stderr)
    print("motley serves nothing: this is llama-server", file=sys.stderr, flush=True)
    time.sleep(86400)


if __name__ == "__main__":
    main()
