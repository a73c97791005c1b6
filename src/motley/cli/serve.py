"""`motley serve`: the HTTP server."""

from __future__ import annotations

import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import typer

from motley.cli.console import reporting_errors
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions
from motley.cli.options.loading import LoadOptions
from motley.cli.options.output import Debug
from motley.cli.options.sampling import SamplingOptions
from motley.cli.options.server import KEYS_VARIABLE, ServerOptions
from motley.cli.options.text import Predict
from motley.engine import SamplingParams
from motley.errors import ConfigError


@with_groups
def serve(
    source: ModelOptions = ModelOptions(),
    predict: Predict = None,
    server: ServerOptions = ServerOptions(),
    chosen: LoadOptions = LoadOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP: the APIs of OpenAI, Anthropic and llama-server.

    -c is the context of each request: it is not divided by -np.

    \b
    [bold]motley serve[/]                                  the bundled model, on port 8080
    [bold]motley serve model.gguf --port 9000 -np 4[/]     at most four requests at a time
    [bold]motley serve model.gguf --device cpu,cpu -sm tensor -ts 3,1[/]
    """
    with reporting_errors(debug):
        try:
            from motley.server.settings import ServerSettings
            from motley.server.supervisor import serve as run_server
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the server needs the package {error.name}", hint="pip install 'motley-llm[server]'"
            ) from None
        path = source.path()
        _start_log(quiet=server.quiet, debug=debug)
        settings = ServerSettings(
            model=path,
            engine_arguments=_placed(chosen, path).arguments(),
            host=server.host,
            port=server.port,
            api_keys=_keys(server),
            aliases=_names(server.alias),
            tags=_names(server.tags),
            defaults=SamplingParams(**sampling.arguments(), context_shift=server.context_shift),
            n_predict=-1 if predict is None else predict,
            chat_template=_template(server),
            reasoning_format=server.reasoning_format,
            reasoning=server.reasoning,
            has_metrics=server.metrics,
            has_slots=server.slots,
            has_page=server.webui,
            slot_save_path=server.slot_save_path,
            pooling=server.pooling,
            cors_origins=_names(server.cors_origins),
            is_verbose=chosen.verbose,
            logs_prompts=server.log_prompts,
            restarts=server.restart,
            max_queue=server.max_queue,
        )
        raise typer.Exit(run_server(settings))


def _placed(chosen: LoadOptions, path: Path) -> LoadOptions:
    """-ngl and -mg as devices. That needs torch, which this process shall not import: another one does it."""
    if chosen.gpu_layers is None and chosen.main_gpu is None:
        return chosen
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(chosen.placed, path).result()


def _keys(server: ServerOptions) -> tuple[str, ...]:
    keys = [*_names(server.api_key), *_names(os.environ.get(KEYS_VARIABLE))]
    if server.api_key_file is not None:
        try:
            lines = server.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable("--api-key-file", server.api_key_file, error) from None
        keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"{server.api_key_file} has no key", hint="a key on each line")
    return tuple(dict.fromkeys(keys))


def _template(server: ServerOptions) -> str | None:
    if server.chat_template_file is None:
        return server.chat_template
    if server.chat_template is not None:
        raise ConfigError("two chat templates", hint="--chat-template or --chat-template-file")
    try:
        return server.chat_template_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable("--chat-template-file", server.chat_template_file, error) from None


def _unreadable(flag: str, file: Path, error: OSError | UnicodeDecodeError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
    return ConfigError(f"cannot read {file}: {why}", hint=f"{flag} takes a text file")


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def _start_log(*, quiet: bool, debug: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("motley.server").setLevel(
        logging.WARNING if quiet else logging.DEBUG if debug else logging.INFO
    )
