"""Chat templates by name, for models whose file has none or a wrong one."""

from __future__ import annotations

from motley.errors import TemplateError
from motley.text.template import CHATML

_TEXT = (
    "{%- macro text(content) -%}{%- if content is string -%}{{ content }}"
    "{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)

# name: (template, strings that end a turn)
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (CHATML, ("<|im_end|>",)),
    "llama3": (
        _TEXT + "{%- for m in messages -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
        "{{- text(m.content) | trim }}{{ '<|eot_id|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}",
        ("<|eot_id|>",),
    ),
    "command-r": (
        _TEXT + "{%- for m in messages -%}{{ '<|START_OF_TURN_TOKEN|>' }}"
        "{%- if m.role == 'system' -%}{{ '<|SYSTEM_TOKEN|>' }}"
        "{%- elif m.role == 'assistant' -%}{{ '<|CHATBOT_TOKEN|>' }}"
        "{%- else -%}{{ '<|USER_TOKEN|>' }}{%- endif -%}"
        "{{- text(m.content) | trim }}{{ '<|END_OF_TURN_TOKEN|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif -%}",
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    "gemma": (
        _TEXT + "{%- set ns = namespace(system='') -%}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{%- set ns.system = text(m.content) | trim + '\\n\\n' -%}"
        "{%- else -%}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}"
        "{%- if m.role != 'assistant' -%}{{ ns.system }}{%- set ns.system = '' -%}{%- endif -%}"
        "{{- text(m.content) | trim }}{{ '<end_of_turn>\\n' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}",
        ("<end_of_turn>",),
    ),
    "phi3": (
        _TEXT + "{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' }}{{- text(m.content) }}"
        "{{ '<|end|>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}",
        ("<|end|>",),
    ),
    "zephyr": (
        _TEXT + "{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' }}{{- text(m.content) }}"
        "{{ eos_token + '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}",
        (),
    ),
    "llama2": (
        _TEXT + "{%- set ns = namespace(system='') -%}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{%- set ns.system = '<<SYS>>\\n' + text(m.content) + '\\n<</SYS>>\\n\\n' -%}"
        "{%- elif m.role == 'assistant' -%}{{ ' ' + text(m.content) + ' ' + eos_token }}"
        "{%- else -%}{{ bos_token + '[INST] ' + ns.system + text(m.content) + ' [/INST]' }}"
        "{%- set ns.system = '' -%}{%- endif -%}{%- endfor -%}",
        (),
    ),
    "mistral-v7": (
        _TEXT + "{{- bos_token }}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{{ '[SYSTEM_PROMPT] ' + text(m.content) + '[/SYSTEM_PROMPT]' }}"
        "{%- elif m.role == 'assistant' -%}{{ ' ' + text(m.content) + eos_token }}"
        "{%- else -%}{{ '[INST] ' + text(m.content) + '[/INST]' }}{%- endif -%}{%- endfor -%}",
        (),
    ),
    "vicuna": (
        _TEXT + "{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{{ text(m.content) + '\\n\\n' }}"
        "{%- elif m.role == 'assistant' -%}{{ 'ASSISTANT: ' + text(m.content) + eos_token + '\\n' }}"
        "{%- else -%}{{ 'USER: ' + text(m.content) + '\\n' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}",
        ("USER:",),
    ),
    "deepseek3": (
        _TEXT + "{{- bos_token }}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{{ text(m.content) + '\\n\\n' }}"
        "{%- elif m.role == 'assistant' -%}{{ '<｜Assistant｜>' + text(m.content) + eos_token }}"
        "{%- else -%}{{ '<｜User｜>' + text(m.content) }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}",
        (),
    ),
}


def named_template(name: str) -> tuple[str, tuple[str, ...]]:
    """The template of this name and its stop strings; a text that is no name is a template itself."""
    if name in NAMED:
        return NAMED[name]
    if not name.strip():
        raise TemplateError("the chat template is empty", hint=f"a template, or one of {', '.join(NAMED)}")
    if "{" not in name:  # a template without variables would give the same prompt for all messages
        raise TemplateError(
            f"there is no chat template {name!r:.60}", hint=f"a template, or one of {', '.join(NAMED)}"
        )
    return name, ()
