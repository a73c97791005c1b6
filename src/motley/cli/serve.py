"""`motley serve`: the HTTP server."""

from __future__ import annotations

import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from motley.cli.console import reporting_errors
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions
from motley.cli.options.loading import LoadOptions
from motley.cli.options.output import Debug
from motley.cli.options.sampling import SamplingOptions
from motley.cli.options.text import Predict
from motley.engine import SamplingParams
from motley.errors import ConfigError

_SERVER = "Server"
_KEYS_VARIABLE = "MOTLEY_API_KEY"


def _flag(*names: str, text: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_SERVER, **settings)


@dataclass(frozen=True)
class ServerOptions:
    """The flags that only the server has. Their names are llama-server's."""

    host: Annotated[str, _flag("--host", text="Address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, _flag("--port", text="Port to listen on; 0: any free one.", metavar="N", min=0)] = (
        8080
    )
    api_key: Annotated[
        str | None,
        _flag(
            "--api-key",
            text=f"Comma-separated keys that clients need. Also read from {_KEYS_VARIABLE}.",
            metavar="KEYS",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, _flag("--api-key-file", text="A file with a key on each line.", metavar="FILE")
    ] = None
    alias: Annotated[
        str | None,
        _flag("-a", "--alias", text="Comma-separated names of the model for clients.", metavar="NAMES"),
    ] = None
    tags: Annotated[
        str | None, _flag("--tags", text="Comma-separated tags of the model.", metavar="TAGS")
    ] = None
    chat_template: Annotated[
        str | None,
        _flag(
            "--chat-template", text="A template's name (chatml, llama3, …) or its text.", metavar="TEMPLATE"
        ),
    ] = None
    chat_template_file: Annotated[
        Path | None, _flag("--chat-template-file", text="A file with a chat template.", metavar="FILE")
    ] = None
    reasoning_format: Annotated[
        str,
        _flag(
            "--reasoning-format",
            text="none: reasoning stays in the content; deepseek, auto: it is returned as reasoning_content.",
            metavar="FORMAT",
        ),
    ] = "auto"
    reasoning: Annotated[
        str,
        _flag(
            "-rea",
            "--reasoning",
            text="on, off: whether the model reasons before it answers; auto: the default of its template.",
            metavar="MODE",
        ),
    ] = "auto"
    context_shift: Annotated[
        bool, _flag("--context-shift", text="When the context is full, drop its oldest tokens and continue.")
    ] = False
    embeddings: Annotated[
        bool,
        _flag(
            "--embeddings",
            "--embedding",
            text="Accepted for compatibility with llama-server: embeddings are always served.",
        ),
    ] = False
    pooling: Annotated[
        str | None, _flag("--pooling", text="Pooling of embeddings: mean, last, cls, none.", metavar="TYPE")
    ] = None
    metrics: Annotated[bool, _flag("--metrics", text="Serve /metrics for Prometheus.")] = False
    slots: Annotated[bool, _flag("--slots/--no-slots", text="Serve /slots.")] = True
    slot_save_path: Annotated[
        Path | None,
        _flag(
            "--slot-save-path",
            text="Folder for saved slots. Default: slots cannot be saved.",
            metavar="FOLDER",
        ),
    ] = None
    webui: Annotated[bool, _flag("--webui/--no-webui", "--ui/--no-ui", text="Serve the page at /.")] = True
    cors_origins: Annotated[
        str,
        _flag(
            "--cors-origins",
            text="Comma-separated origins of web pages that may call; localhost: pages of this machine; *: all pages.",
            metavar="ORIGINS",
        ),
    ] = "*"
    max_queue: Annotated[
        int, _flag("--max-queue", text="Maximum of waiting requests; more get a 429.", metavar="N", min=0)
    ] = 1024
    restart: Annotated[bool, _flag("--restart", text="Start the engine again if it dies.")] = False
    log_prompts: Annotated[bool, _flag("--log-prompts", text="Put the text of prompts into the log.")] = False
    quiet: Annotated[bool, _flag("--log-disable", text="Log no line for each request.")] = False


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
    keys = [*_names(server.api_key), *_names(os.environ.get(_KEYS_VARIABLE))]
    if server.api_key_file is not None:
        try:
            lines = server.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {server.api_key_file}: {error}") from None
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
        raise ConfigError(f"cannot read {server.chat_template_file}: {error}") from None


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def _start_log(*, quiet: bool, debug: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("motley.server").setLevel(
        logging.WARNING if quiet else logging.DEBUG if debug else logging.INFO
    )
