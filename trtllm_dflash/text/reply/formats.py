"""The ways in which models write calls of tools, by name."""

from collections.abc import Mapping
from typing import Any, Literal

from trtllm_dflash.text.reply.llama3 import Llama3Parser
from trtllm_dflash.text.reply.parts import PlainParser, TextParser
from trtllm_dflash.text.reply.qwen3 import Qwen3Parser
from trtllm_dflash.text.reply.qwen3_coder import Qwen3CoderParser
from trtllm_dflash.text.reply.thinking import ThinkingParser

#: `harmony` is gpt-oss's, which is known by its tokenizer and parsed by its tokens.
ChatFormat = Literal["qwen3", "qwen3-coder", "llama3", "harmony"]

#: What a chat template has in it that asks for calls written so; the first that is found.
_SIGNS: Mapping[str, ChatFormat] = {
    "<function=": "qwen3-coder",
    "<tool_call>": "qwen3",
    "ipython": "llama3",
}


def format_of_template(template: str) -> ChatFormat | None:
    """Finds the format that a chat template asks for; None where it knows no tools, or others than these."""
    return next((name for sign, name in _SIGNS.items() if sign in template), None)


def reply_parser(
    chat_format: ChatFormat | None, schemas: Mapping[str, Mapping[str, Any]] | None, thinking: bool = False
) -> TextParser:
    """Makes a parser of one reply's text.

    Args:
        schemas: of the parameters of each function that may be called, by its name; None: no calls are looked for.
        thinking: the prompt ended inside the thinking.
    """
    calls: TextParser = PlainParser()
    if schemas is not None and chat_format == "llama3":
        calls = Llama3Parser()
    elif schemas is not None and chat_format == "qwen3":
        calls = Qwen3Parser()
    elif schemas is not None and chat_format == "qwen3-coder":
        calls = Qwen3CoderParser(schemas)
    thinks = thinking or chat_format in ("qwen3", "qwen3-coder")
    return ThinkingParser(calls, thinking) if thinks else calls
