"""`motley worker`: lends this machine's devices to another process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.console import reporting_errors, say
from motley.runtime.hosts.protocol import read_secret
from motley.runtime.hosts.serving import WorkerServer

Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        help="Address and port to wait at. Other addresses than this machine's own need a secret. Port 0: a free one.",
        metavar="ADDR:PORT",
    ),
]
Models = Annotated[
    Path | None,
    typer.Option("--models", help="Folder with model files. Default: the same path as on the other machine."),
]


def worker(
    listen: Listen = "127.0.0.1:29400",
    secret_file: options.SecretFile = None,
    models: Models = None,
    threads: options.Threads = None,
    debug: options.Debug = False,
) -> None:
    """Lend this machine's devices to a Motley on this or another machine.

    It stays up and serves one crew after the other. The model file must be here, too: at the same path, or in the
    folder --models.

    \b
    [bold]motley worker --listen 10.0.0.2:29400 --secret-file secret[/]     on 10.0.0.2, and elsewhere:
    [bold]motley run model.gguf --device cpu,cpu@10.0.0.2:29400 --secret-file secret[/]
    """
    with reporting_errors(debug):
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
        server = WorkerServer(listen, read_secret(secret_file), models=models, n_threads=threads)
        say(f"worker: listens at {server.address}")
        try:
            server.serve()
        finally:
            server.close()
