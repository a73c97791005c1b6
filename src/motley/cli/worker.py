"""`motley worker`: lends this machine's devices to another process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.console import reporting_errors, say
from motley.cli.options.devices import SecretFile
from motley.cli.options.model import Threads
from motley.cli.options.output import Debug
from motley.runtime.hosts.protocol import read_secret
from motley.runtime.hosts.serving import WorkerServer

Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        help="Address and port to listen on; port 0: any free one. An address that other machines can "
        "reach needs a secret.",
        metavar="ADDR:PORT",
    ),
]
Models = Annotated[
    Path | None,
    typer.Option(
        "--models",
        metavar="FOLDER",
        help="Folder with model files. Default: the same path as on the other machine.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Folder for parts of models that are sent. Default: ~/.cache/motley/parts.",
    ),
]


def worker(
    listen: Listen = "127.0.0.1:29400",
    secret_file: SecretFile = None,
    models: Models = None,
    cache: Cache = None,
    threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Lend this machine's devices to a Motley on this or another machine.

    It stays up and serves one crew after the other. If the model file is not here, at the same path or in the folder
    --models, the other machine sends the parts that this one needs, which are kept in the folder --cache.

    \b
    [bold]motley worker --listen 10.0.0.2:29400 --secret-file secret[/]
    [bold]motley run model.gguf --device cpu,cpu@10.0.0.2:29400 --secret-file secret[/]

    The first line is for the machine 10.0.0.2, the second for any other that reaches it.
    """
    with reporting_errors(debug):
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
        server = WorkerServer(listen, read_secret(secret_file), models=models, cache=cache, n_threads=threads)
        say(f"worker: listening on {server.address}")
        try:
            server.serve()
        finally:
            server.close()
