"""The ways in which models write calls of tools, by name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.text.reply import gemma4, kimi_k2, minimax_m2, qwen3, qwen3_coder
from trtllm_dflash.text.reply.beside_form import BesideFormParser
from trtllm_dflash.text.reply.llama3 import Llama3Parser, one_call_each
from trtllm_dflash.text.reply.llama3_form import opening
from trtllm_dflash.text.reply.parts import PlainParser, TextParser
from trtllm_dflash.text.reply.qwen3 import Qwen3Parser
from trtllm_dflash.text.reply.thinking import CLOSING, OPENING, ThinkingParser
from trtllm_dflash.text.reply.xml_call import XmlCallParser, with_objects

#: `harmony` is gpt-oss's, which is known by its tokenizer and parsed by its tokens.
ChatFormat = Literal["qwen3", "qwen3-coder", "llama3", "harmony", "gemma4", "minimax-m2", "kimi-k2"]

#: What a chat template has in it that asks for calls written so; the first that is found.
_SIGNS: Mapping[str, ChatFormat] = {
    "<function=": "qwen3-coder",
    minimax_m2.TAGS.opening: "minimax-m2",
    kimi_k2.SECTION: "kimi-k2",
    gemma4.CALL: "gemma4",
    "<tool_call>": "qwen3",
    "ipython": "llama3",
}

#: Markers of a format's replies, which are special tokens of some tokenizers: text that parsers need.
_MARKERS: Mapping[ChatFormat, tuple[str, ...]] = {
    "gemma4": (gemma4.CHANNEL, gemma4.CHANNEL_END, gemma4.CALL, gemma4.CALL_END, gemma4.QUOTE),
    "minimax-m2": (OPENING, CLOSING, minimax_m2.TAGS.opening, minimax_m2.TAGS.closing),
    "kimi-k2": (
        *(OPENING, CLOSING, kimi_k2.SECTION, kimi_k2.SECTION_END),
        *(kimi_k2.CALL, kimi_k2.CALL_ARGUMENTS, kimi_k2.CALL_END),
    ),
}

#: What replies begin with that are calls and have no form; of Gemma's, thinking before them too. Llama's are in JSON.
_OPENINGS: Mapping[ChatFormat, tuple[str, ...]] = {
    "qwen3": (qwen3.OPENING,),
    "qwen3-coder": (qwen3_coder.TAGS.opening,),
    "gemma4": (gemma4.CHANNEL, gemma4.CALL),
    "minimax-m2": (minimax_m2.TAGS.opening,),
    "kimi-k2": (kimi_k2.SECTION,),
}

#: How a format's template wants messages that differ from OpenAI's.
_MESSAGES: Mapping[ChatFormat, Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]] = {
    "llama3": one_call_each,
    "gemma4": gemma4.with_responses,
    "kimi-k2": kimi_k2.with_own_ids,
    "minimax-m2": with_objects,
    "qwen3-coder": with_objects,
}


def read_template(folder: Path) -> str | None:
    """Reads the chat template in a checkpoint's folder; None where none lies there by itself.

    Raises:
        CheckpointError: it cannot be read, or is not UTF-8.
    """
    file = folder / "chat_template.jinja"
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 ({error}); download it again") from None


def format_of_template(template: str) -> ChatFormat | None:
    """Finds the format that a chat template asks for; None where it knows no tools, or others than these."""
    return next((name for sign, name in _SIGNS.items() if sign in template), None)


def markers_of(chat_format: ChatFormat | None) -> tuple[str, ...]:
    """Lists the markers of a format's replies that may be special tokens."""
    return () if chat_format is None else _MARKERS.get(chat_format, ())


def messages_for(chat_format: ChatFormat | None, template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Writes a conversation's messages as the format's chat template wants them."""
    rewrite = None if chat_format is None else _MESSAGES.get(chat_format)
    if rewrite is None or (chat_format == "gemma4" and gemma4.RESPONSES not in template):
        return messages
    return rewrite(messages)


def reply_parser(
    chat_format: ChatFormat | None,
    schemas: Mapping[str, Mapping[str, Any]] | None,
    thinking: bool = False,
    beside_form: Sequence[str] = (),
    held: bool = False,
    must: bool = False,
) -> TextParser:
    """Makes a parser of one reply's text.

    Args:
        schemas: of the parameters of each function that may be called, by its name; None: no calls are looked for.
        thinking: the prompt ended inside the thinking.
        beside_form: functions that may be called where a reply has a form unless it is calls, which are held to theirs.
        held: calls are held to the form that templates write: their values may have others' tags in them.
        must: the reply is held to be calls and nothing else, behind thinking that its own marker ends.
    """
    if chat_format == "gemma4":
        reply = gemma4.Gemma4Parser(calls=schemas is not None)
        has_form = bool(beside_form) or (held and schemas is None)
        return BesideFormParser(reply, _openings(chat_format, beside_form)) if has_form else reply
    calls: TextParser = PlainParser()
    ends: tuple[str, ...] = ()  # of thinking, besides its own
    if schemas is not None and chat_format == "llama3":
        calls = Llama3Parser()
    elif schemas is not None and chat_format == "qwen3":
        calls = Qwen3Parser()
    elif schemas is not None and chat_format == "qwen3-coder":
        calls = XmlCallParser(qwen3_coder.TAGS, schemas, held, held and not thinking)
        ends = qwen3_coder.beginnings(schemas)
    elif schemas is not None and chat_format == "minimax-m2":
        calls, ends = XmlCallParser(minimax_m2.TAGS, schemas, held), (minimax_m2.TAGS.opening,)
    elif schemas is not None and chat_format == "kimi-k2":
        calls, ends = kimi_k2.KimiK2Parser(), (kimi_k2.SECTION,)
    if beside_form and chat_format is not None:
        calls = BesideFormParser(calls, _openings(chat_format, beside_form))
    thinks = thinking or chat_format in ("qwen3", "qwen3-coder", "minimax-m2", "kimi-k2")
    return ThinkingParser(calls, thinking, () if must else ends) if thinks else calls


def _openings(chat_format: ChatFormat, functions: Sequence[str]) -> Sequence[str]:
    """Lists what a reply begins with that is calls of these functions and has no form."""
    if chat_format == "llama3":
        return ["".join(opening(function)) for function in functions]
    return _OPENINGS[chat_format]
