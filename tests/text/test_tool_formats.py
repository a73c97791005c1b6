"""Which format each template gets, and that answers as the template itself writes them are read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from motley.errors import TemplateError
from motley.text import ChatTemplate
from motley.text.messages import normalise_messages, template_variables
from motley.text.tools import ChatFormat, ParsedAnswer, Style, derive_format

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How many."},
                "units": {"type": "array", "items": {"type": "string"}, "description": "Which."},
            },
            "required": ["city"],
        },
    },
}
CALLS = [
    ("get_weather", {"city": "Bad Ischl", "days": 3}),
    ("get_weather", {"city": 'Łódź "x" <b>\nand\tmore', "days": -1}),
]

STYLES = {
    Style.JSON: [
        "Apertus-8B-Instruct",
        "Apriel-1.6-15b-Thinker-fixed",
        "Bielik-11B-v3.0-Instruct",
        "Cohere2MoE",
        "CohereForAI-c4ai-command-r-plus-tool_use",
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "GigaChat3-10B-A1.8B",
        "GigaChat3.1-10B-A1.8B",
        "MiMo-VL",
        "MiniMax-M1",
        "NVIDIA-Nemotron-Nano-v2",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Reka-Edge",
        "fireworks-ai-llama-3-firefunction-v2",
        "ibm-granite-granite-3.3-2B-Instruct",
        "ibm-granite-granite-4.0",
        "ibm-granite-granite-4.1",
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "unsloth-Apriel-1.5",
    ],
    Style.NAMED_JSON: [
        "Kimi-K2-Instruct",
        "Kimi-K2-Thinking",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "deepseek-ai-DeepSeek-V3.1",
        "llama-cpp-deepseek-r1",
        "meetkai-functionary-medium-v3.1",
        "meetkai-functionary-medium-v3.2",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "moonshotai-Kimi-K2",
        "unsloth-mistral-Devstral-Small-2507",
        "upstage-Solar-Open-100B",
    ],
    Style.TAGGED: [
        "ByteDance-Seed-OSS",
        "GLM-4.6",
        "GLM-4.7-Flash",
        "Kimi-K3",
        "MiniMax-M2",
        "MiniMax-M3",
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "Qwen3-Coder",
        "Qwen3.5-4B",
        "StepFun3.5-Flash",
        "deepseek-ai-DeepSeek-V3.2",
        "deepseek-ai-DeepSeek-V4",
        "deepseek-ai-DeepSeek-V4-Flash-0731",
        "openbmb-MiniCPM5-1B",
        "poolside-Laguna-S-2.1",
        "poolside-Laguna-XS-2.1",
        "poolside-Laguna-XS.2",
        "tencent-Hy3",
    ],
    Style.PYTHON: ["LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct"],
    Style.GEMMA: ["google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"],
    Style.HARMONY: ["openai-gpt-oss-120b"],
    Style.GENERIC: [
        "HuggingFaceTB-SmolLM3-3B",
        "google-gemma-2-2b-it",
        "llama-cpp-rwkv-world",
        "microsoft-Phi-3.5-mini-instruct",
        "muse-glimmer",  # has calls, with a header that names the function twice: not read
    ],
}
EXPECTED = {name: style for style, names in STYLES.items() for name in names}
# Templates that show no call in what they render, or refuse: their formats are exceptions, without a rendered truth.
NO_TRUTH = {
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "ibm-granite-granite-3.3-2B-Instruct",
    *("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", *STYLES[Style.GENERIC]),
}


@pytest.fixture(scope="module")
def templates(shared: Path) -> Mapping[str, ChatTemplate]:
    paths = sorted((shared / "data" / "templates").glob("*.jinja"))
    return {path.stem: ChatTemplate(path.read_text(), bos="<BOS>", eos="<EOS>") for path in paths}


@pytest.fixture(scope="module")
def formats(templates: Mapping[str, ChatTemplate]) -> Mapping[str, ChatFormat]:
    return {name: ChatFormat(template) for name, template in templates.items()}


def test_each_template_gets_its_style(formats: Mapping[str, ChatFormat]) -> None:
    assert {name: form.format.style for name, form in formats.items()} == EXPECTED


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - NO_TRUTH))
@pytest.mark.parametrize("n_calls", [1, 2])
def test_calls_as_the_template_writes_them_are_read_back(
    formats: Mapping[str, ChatFormat], name: str, n_calls: int
) -> None:
    form = formats[name]
    if n_calls > 1 and not form.format.is_parallel:
        return  # one call at a time
    # The template of LFM2.5 does not escape text.
    truth = [CALLS[0], CALLS[0]] if form.format.style is Style.PYTHON else CALLS
    calls = [
        {
            "id": f"abcdefgh{i}",
            "type": "function",
            "function": {"name": f, "arguments": json.dumps(arguments)},
        }
        for i, (f, arguments) in enumerate(truth[:n_calls])
    ]
    answer = _parsed(
        form, _answer(form, {"role": "assistant", "content": None, "tool_calls": calls}), [WEATHER]
    )
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == truth[:n_calls]
    assert answer.content == ""
    assert answer.reasoning == ""


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"openai-gpt-oss-120b"}))
def test_reasoning_and_content_are_read_back(formats: Mapping[str, ChatFormat], name: str) -> None:
    form = formats[name]
    text = _answer(
        form, {"role": "assistant", "content": "An answer.", "reasoning_content": "A thought.\n\nMore."}
    )
    reasoning = form.format.reasoning
    answer = _parsed(form, text, [])
    if "A thought." not in text:
        if reasoning is not None and form.session([USER]).prompt.rstrip().endswith(reasoning.start.strip()):
            assert (
                answer.reasoning == "An answer."
            )  # the prompt has opened the reasoning, the history leaves it out
        else:
            assert answer.content.strip() == "An answer."
        return
    assert answer.content == "An answer."
    assert answer.reasoning == "A thought.\n\nMore."


# What ends a turn is a token that an engine does not show.
END_TOKENS = (
    *(
        "<|im_end|>",
        "<EOS>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|END_OF_TURN_TOKEN|>",
        "<seed:eos>",
        "<|message_sep|>",
    ),
    *(
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
        "<end_of_sentence>",
        "[e~[",
        "<SPECIAL_12>",
        "<sep>",
        "<turn|>",
    ),
    *(
        "<｜end▁of▁sentence｜>",
        "<|end_of_text|>",
        "<｜hy_eos:opensource｜>",
        "<|end|>",
        "<end_of_turn>",
        "</assistant>",
    ),
    *("<|calls|>", "<|eot|>", "<|tool_response>", "<|call|>", "<|return|>", "<｜Assistant｜>"),
)
USER = {"role": "user", "content": "Go."}


def _answer(form: ChatFormat, message: dict[str, Any]) -> str:
    """What a model would write for `message`: the template's rendering of it, behind the prompt."""
    session = form.session([USER], tools=[WEATHER])
    messages = normalise_messages([USER, message], has_text_arguments=form.format.has_text_arguments)
    variables = template_variables(form.template.source, [WEATHER])
    whole, prompted = (
        form.template.render(messages, tools=[WEATHER], add_generation_prompt=prompt, **variables)
        for prompt in (False, True)
    )
    prompt = str(session.prompt)
    whole, prompt = whole[whole.rfind("Go.") :], prompt[prompt.rfind("Go.") :]
    if prompted.endswith(whole):  # the template makes a prompt unasked
        unasked = _common_prefix(whole[::-1], prompt[::-1])[::-1]
        whole = whole.removesuffix(unasked[unasked.find("<") :] if "<" in unasked else "")
    whole = whole.split("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Write")[0]
    begin = _common_prefix(whole, prompt)
    if len(begin) < len(prompt) and begin.rfind("<") > begin.rfind(">"):
        begin = begin[: begin.rfind("<")]
    if (
        len(begin) < len(prompt) and form.format.reasoning
    ):  # the prompt closes the reasoning that the answer has
        begin = begin.removesuffix(form.format.reasoning.start)
    text = whole[len(begin) :].removeprefix("<|CHATBOT_TOKEN|>")
    while (end := next((t for t in END_TOKENS if text.rstrip().endswith(t)), None)) is not None:
        text = text.rstrip().removesuffix(end)
    return text.rstrip()


def _common_prefix(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def _parsed(form: ChatFormat, text: str, tools: list[dict[str, Any]]) -> ParsedAnswer:
    parser = form.session([USER], tools=tools).parser()
    answer = ParsedAnswer()
    for i in range(0, len(text), 7):
        answer.add(parser.push(text[i : i + 7]))
    return answer.add(parser.finish())


def test_a_template_that_refuses_everything_is_generic() -> None:
    form = derive_format(ChatTemplate("{{ raise_exception('no') }}"))
    assert form.style is Style.GENERIC
    with pytest.raises(TemplateError):
        ChatFormat(ChatTemplate("{{ raise_exception('no') }}")).session([{"role": "user", "content": "x"}])
