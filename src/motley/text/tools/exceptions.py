"""Formats that comparing samples cannot find: the template refuses them, hides calls, or has a syntax of its own."""

from __future__ import annotations

from motley.text.tools.format import JsonCall, NamedCall, Reasoning, Style, ToolFormat

KNOWN_REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("<mm:think>", "</mm:think>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    Reasoning("<|channel>thought\n", "<channel|>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning(" to=self<|message|>", "<|eom|><|start|>assistant"),
    Reasoning("<|think|>", "<|end|><|begin|>assistant"),
)

HARMONY = ToolFormat(Style.HARMONY, is_parallel=False)
LFM = ToolFormat(
    Style.PYTHON, section_start="<|tool_call_start|>[", section_end="]<|tool_call_end|>", separator=", "
)
GEMMA = ToolFormat(Style.GEMMA, call_start="<|tool_call>call:", call_end="<tool_call|>")
GRANITE = ToolFormat(Style.JSON, section_start="<|tool_call|>[", section_end="]", separator=", ")
FUNCTIONARY = ToolFormat(
    Style.NAMED_JSON,
    call_start=">>>",
    named=NamedCall(("\n",)),
    content_start=">>>all\n",
    has_text_arguments=True,
    primer=">>>",
)
LLAMA = ToolFormat(Style.JSON, json=JsonCall("name", "parameters"), is_parallel=False)
DEEPSEEK_R1 = ToolFormat(
    Style.NAMED_JSON,
    section_start="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_start="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    call_end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    named=NamedCall(("\n```json\n",)),
)

# What a template's source must contain, all of it, for the format to hold.
_EXCEPTIONS = (
    (("<|channel|>", "<|message|>", "<|call|>", "analysis"), HARMONY),
    (("<|tool_list_start|>",), LFM),
    (("<|tool_call_start|>", "format_arg"), LFM),
    (("List of tools: [", "keep_past_thinking"), LFM),
    (("<|tool_call>call:",), GEMMA),
    (("<|tool_call|> followed by a JSON list", "available_tools"), GRANITE),
    ((">>>all\\n", ">>>${recipient}"), FUNCTIONARY),
    (("<|python_tag|>", '"parameters": '), LLAMA),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_R1),
)


def exception_for(source: str) -> ToolFormat | None:
    return next((found for needed, found in _EXCEPTIONS if all(text in source for text in needed)), None)
