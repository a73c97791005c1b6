"""The flags that only `motley serve` has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from motley.cli.options.flag import flag

KEYS_VARIABLE = "MOTLEY_API_KEY"
_MAX_PORT = 65535
_flag = partial(flag, panel="Server")


@dataclass(frozen=True)
class ServerOptions:
    """The flags that only the server has. Their names are llama-server's."""

    host: Annotated[str, _flag("--host", text="Address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[
        int, _flag("--port", text="Port to listen on; 0: any free one.", metavar="N", min=0, max=_MAX_PORT)
    ] = 8080
    api_key: Annotated[
        str | None,
        _flag(
            "--api-key",
            text=f"Comma-separated keys that clients need. Also read from {KEYS_VARIABLE}.",
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
