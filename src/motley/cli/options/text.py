"""The flags for the text that a command reads or writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from motley.cli.options.flag import flag

Prompt = Annotated[
    str | None, flag("-p", "--prompt", text="The prompt, or the text to read.", metavar="TEXT")
]
File = Annotated[
    Path | None,
    flag("-f", "--file", text="Read the text from a file; -: from standard input.", metavar="FILE"),
]
Escape = Annotated[
    bool, flag("-e", "--escape", text=r"Read \n, \t, \\ and other escapes in -p, -sys and -r.")
]
Chunks = Annotated[int | None, flag("--chunks", text="Use only the first N chunks.", metavar="N", min=1)]
SystemPrompt = Annotated[
    str | None,
    flag("-sys", "--system-prompt", text="How the model should behave in a chat.", metavar="TEXT"),
]
ConversationFlag = Annotated[
    bool | None,
    flag(
        "-cnv/-no-cnv",
        "--conversation/--no-conversation",
        text="Use the model's chat template and keep chatting after -p; or only continue the text. "
        "Default: one answer to -p, through the template if the model has one.",
    ),
]
ChatTemplateFlag = Annotated[
    str | None,
    flag(
        "--chat-template",
        text="Use this chat template: a name in the model file, a common one such as chatml or "
        "llama3, or a file with Jinja text. Default: the model's own.",
        metavar="NAME",
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    flag("--chat-template-file", text="The same, always from a file.", metavar="FILE"),
]
PromptCache = Annotated[
    Path | None,
    flag(
        "--prompt-cache",
        text="Read the KV cache of the prompt from this file if it exists, and write it afterwards.",
        metavar="FILE",
    ),
]
PromptCacheAll = Annotated[
    bool, flag("--prompt-cache-all", text="Also write the answer's part of the cache.")
]
PromptCacheReadOnly = Annotated[bool, flag("--prompt-cache-ro", text="Never write the file.")]
SingleTurn = Annotated[bool, flag("-st", "--single-turn", text="Exit after one answer.")]
Predict = Annotated[
    int | None,
    flag(
        "-n",
        "--predict",
        "--n-predict",
        text="Maximum number of tokens to generate; -1: only the context limits it. Default: no limit; 4096 for each "
        "answer in the chat of motley run.",
        metavar="N",
    ),
]
ReversePrompt = Annotated[
    list[str] | None,
    flag("-r", "--reverse-prompt", text="Stop at this text. Can be repeated.", metavar="TEXT"),
]
ContextShift = Annotated[
    bool,
    flag(
        "--context-shift/--no-context-shift",
        text="When the context is full, drop the older half of it and continue.",
    ),
]
Keep = Annotated[
    int,
    flag(
        "--keep",
        text="Tokens at the start that --context-shift keeps; -1: the whole prompt.",
        metavar="N",
        min=-1,
    ),
]
IgnoreEos = Annotated[bool, flag("--ignore-eos", text="Continue when the model says that it has finished.")]
