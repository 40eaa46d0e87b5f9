"""Small hybrids that chat: templates of our own in the shape of those of Qwen3.5 and Qwen3-Coder-Next."""

import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.conftest import TINY
from tests.hybrid_checkpoints import make_hybrid
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings

_HEAD = """{%- if tools or messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' }}
{%- if tools -%}
{{ 'Functions:\\n' }}
{%- for tool in tools -%}{{ tool.function | tojson }}{{ '\\n' }}{%- endfor -%}
{{ 'Call them as <tool_call>\\n<function=NAME>\\n' }}
{%- endif -%}
{{ messages[0].content if messages[0].role == 'system' }}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- macro turn(role, text) -%}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{%- endmacro -%}
{%- macro calls(message) -%}
{%- for call in message.tool_calls or [] -%}
{{ ('\\n\\n' if message.content else '') if loop.first else '\\n' }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for k, v in call.function.arguments | items -%}
{{ '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{%- endmacro -%}
{%- macro result(message) -%}
{{ '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- endmacro -%}
"""

#: Thinks unless `enable_thinking` is false. Thinking that a question has followed is left out of the past.
QWEN35 = (
    _HEAD
    + """{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if last.question < 0 -%}{{ raise_exception('there is no question') }}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('a system message comes first') }}{%- endif -%}
{%- elif message.role == 'user' -%}{{ turn('user', message.content) }}
{%- elif message.role == 'tool' -%}{{ turn('user', result(message)) }}
{%- else -%}
{%- set thought = '<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' -%}
{{ turn('assistant', (thought if loop.index0 > last.question else '') + message.content + calls(message)) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else -%}{{ '<think>\\n' }}{%- endif -%}
{%- endif -%}"""
)

#: Never thinks.
CODER_NEXT = (
    _HEAD
    + """{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
{{ turn('user', result(message)) if message.role == 'tool' else turn(message.role, message.content + calls(message)) }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""
)

#: The layout of each published family's checkpoint, and the shape of its chat template.
CHATS = {"qwen3_5": QWEN35, "qwen3_5_moe, stacked": QWEN35, "qwen3_next": CODER_NEXT}
THINKERS = [layout for layout, template in CHATS.items() if template == QWEN35]
#: Tokens of their own in these tokenizers, and no special ones.
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def write_chat(folder: Path, template: str) -> Path:
    """Gives a target's folder the shipped tokenizer, with the markers as tokens, and a chat template."""
    shutil.copyfile(TINY / "target" / "tokenizer_config.json", folder / "tokenizer_config.json")
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in _MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def make_chat_engine(folder: Path, layout: str) -> Path:
    """Builds the engine of a small hybrid in a family's layout, with a template in that family's shape."""
    target = write_chat(make_hybrid(folder / "target", layout, vocab=2048 + len(_MARKERS)), CHATS[layout])
    values = {"name": "small", "target": str(target), "backend": "torch", "precision": "fp32", "max_seq_len": 1024}
    build(BuildSettings.model_validate(values), folder / "engine")
    return folder / "engine"
