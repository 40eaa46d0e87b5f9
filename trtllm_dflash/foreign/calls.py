"""Parsers by which runtimes read calls of tools and thinking out of replies, by the way in which a target writes them.

Names are those of vLLM 0.26.0 (vllm/tool_parsers/__init__.py, vllm/reasoning/__init__.py) and SGLang 0.5.23
(sglang/srt/function_call/parser_names.py, sglang/srt/parser/reasoning_parser_names.py).
"""

from collections.abc import Mapping
from pathlib import Path

from trtllm_dflash.text.reply.formats import ChatFormat, format_of_template, read_template

#: Of a family whose chat template is not at hand. Those named Coder write calls in a way of their own.
_FORMATS: Mapping[str, ChatFormat] = {
    "gpt_oss": "harmony",
    "llama": "llama3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3",
    "qwen3_5": "qwen3-coder",
    "qwen3_5_moe": "qwen3-coder",
    "gemma4": "gemma4",
    "minimax_m2": "minimax-m2",
    "kimi_k25": "kimi-k2",
}

VLLM_CALLS: Mapping[ChatFormat, str] = {
    "harmony": "openai",
    "llama3": "llama3_json",
    "qwen3": "hermes",
    "qwen3-coder": "qwen3_coder",
    "gemma4": "gemma4",
    "minimax-m2": "minimax_m2",
    "kimi-k2": "kimi_k2",
}
SGLANG_CALLS: Mapping[ChatFormat, str] = {
    "harmony": "gpt-oss",
    "llama3": "llama3",
    "qwen3": "qwen25",
    "qwen3-coder": "qwen3_coder",
    "gemma4": "gemma4",
    "minimax-m2": "minimax-m2",
    "kimi-k2": "kimi_k2",
}
#: By family: of the others there are models that think and models that do not.
VLLM_THINKING: Mapping[str, str] = {
    "gpt_oss": "openai_gptoss",
    "qwen3_5": "qwen3",
    "qwen3_5_moe": "qwen3",
    "gemma4": "gemma4",
    "minimax_m2": "minimax_m2",
    "kimi_k25": "kimi_k2",
}
SGLANG_THINKING: Mapping[str, str] = {
    "gpt_oss": "gpt-oss",
    "qwen3_5": "qwen3",
    "qwen3_5_moe": "qwen3",
    "gemma4": "gemma4",
    "minimax_m2": "minimax",
    "kimi_k25": "kimi_k2",
}


def format_of_target(target: str, family: str) -> ChatFormat | None:
    """Finds how a target writes calls: by the chat template in its folder, else by its name; None: not known.

    Args:
        target: a folder, or a Hugging Face name.
        family: `model_type` in its config.json.

    Raises:
        CheckpointError: the template cannot be read.
    """
    if family == "gpt_oss":  # known by its tokenizer
        return "harmony"
    template = read_template(Path(target))
    if template is not None:
        return format_of_template(template)
    return "qwen3-coder" if "coder" in target.lower() and family in _FORMATS else _FORMATS.get(family)
