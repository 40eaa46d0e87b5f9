"""Harmony, gpt-oss's chat format, through OpenAI's own library.

A conversation becomes tokens with a system message that says who the model is, how hard it is to think and what day it
is. A reply has channels: `analysis`, which is its thinking, and `final`, which is what the user is meant to read.

The library needs its vocabulary as a file, which it would download. The checkpoint's tokenizer has the same vocabulary:
the file is written from that, and the library compares its digest with the one it knows. Nothing is downloaded.
"""

import base64
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from openai_harmony import (
    Conversation,
    DeveloperContent,
    HarmonyEncoding,
    HarmonyEncodingName,
    HarmonyError,
    Message,
    ReasoningEffort,
    Role,
    StreamableParser,
    StreamState,
    SystemContent,
    load_harmony_encoding,
)
from tokenizers import Tokenizer

from trtllm_dflash.errors import EngineError, RequestError
from trtllm_dflash.text.stream import TextStream

#: Tokens by which its tokenizer is known.
_TOKENS = {"<|return|>": 200002, "<|channel|>": 200005, "<|start|>": 200006, "<|message|>": 200008}
_VOCABULARY_FILE = "o200k_base.tiktoken"
_VOCABULARY_FOLDER = "TIKTOKEN_ENCODINGS_BASE"  # where the library looks for it
_ARGUMENTS = ("reasoning_effort", "model_identity", "conversation_start_date")
_FINAL = "final"
_SPEAKERS = ("user", "assistant")  # whose message stands even where it is empty


class Harmony:
    """Harmony's encoder and parser for one tokenizer."""

    def __init__(self, encoding: HarmonyEncoding, tokenizer: Tokenizer) -> None:
        self._encoding = encoding
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Harmony | None":
        """Makes Harmony for a tokenizer that has its tokens; None for others.

        Raises:
            EngineError: it has Harmony's own tokens and another vocabulary.
        """
        if any(tokenizer.token_to_id(token) != number for token, number in _TOKENS.items()):
            return None
        with _vocabulary_of(tokenizer):
            try:
                return cls(load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS), tokenizer)
            except HarmonyError as error:
                raise EngineError(f"tokenizer.json has Harmony's tokens, but not its vocabulary: {error}") from None

    def encode(self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any]) -> list[int]:
        """Encodes a conversation as token ids, up to where the assistant's reply begins.

        Args:
            messages: with roles user, assistant, and system or developer, whose text is the developer's instructions.
            arguments: `reasoning_effort` (low, medium, high), `model_identity`, `conversation_start_date` (today).

        Raises:
            RequestError: a role or an argument is not known.
        """
        system = Message.from_role_and_content(Role.SYSTEM, _system(arguments))
        rest = [_message(message) for message in messages if message["content"] or message["role"] in _SPEAKERS]
        conversation = Conversation.from_messages([system, *rest])
        return list(self._encoding.render_conversation_for_completion(conversation, Role.ASSISTANT))

    def reply(self, stop: tuple[str, ...] = ()) -> TextStream:
        """Starts the text of a reply's final channel, which grows as tokens arrive; see `TextStream`."""
        return _FinalText(StreamableParser(self._encoding, Role.ASSISTANT), self._tokenizer, stop)


class _FinalText(TextStream):
    """Parses a reply's tokens, and keeps the text of the final message."""

    def __init__(self, parser: StreamableParser, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        super().__init__(tokenizer, stop)
        self._parser: StreamableParser | None = parser
        self._header: list[int] | None = []  # the tokens so far, while no message has begun

    def push(self, token: int) -> None:
        if self._parser is None:
            super().push(token)
            return
        was_content = self._parser.state is StreamState.CONTENT
        try:
            self._parser.process(token)
        except HarmonyError:
            self._take_as_it_is(token)
            return
        is_content = self._parser.state is StreamState.CONTENT
        if is_content:
            self._header = None
        elif self._header is not None:
            self._header.append(token)
        # Neither the token that opens the content nor the one that ends it.
        if was_content and is_content and self._parser.current_channel == _FINAL:
            super().push(token)

    def finish(self) -> None:
        # A header of Harmony's that was cut short says nothing; a text in which none of its tokens came is no Harmony.
        if self._header is not None and not set(self._header) & set(_TOKENS.values()):
            self._take_as_it_is()
        super().finish()

    def _take_as_it_is(self, *tokens: int) -> None:
        """Shows a reply that is not Harmony as it is: from here on all of it, and all before if none was shown yet."""
        self._parser = None
        header, self._header = self._header or [], None
        for token in (*header, *tokens):
            super().push(token)


def _system(arguments: Mapping[str, Any]) -> SystemContent:
    unknown = sorted(set(arguments) - set(_ARGUMENTS))
    if unknown:
        raise RequestError(f"chat argument {unknown[0]!r} is not known to Harmony; known: {', '.join(_ARGUMENTS)}")
    effort = str(arguments.get("reasoning_effort", "medium")).capitalize()
    levels = [level.value for level in ReasoningEffort]
    if effort not in levels:
        raise RequestError(f"reasoning_effort {arguments['reasoning_effort']!r}: choose low, medium or high")
    content = SystemContent.new().with_reasoning_effort(ReasoningEffort(effort))
    if "model_identity" in arguments:
        content = content.with_model_identity(str(arguments["model_identity"]))
    return content.with_conversation_start_date(str(arguments.get("conversation_start_date", date.today())))


def _message(message: Mapping[str, str]) -> Message:
    role, text = message["role"], message["content"]
    if role in ("system", "developer"):
        return Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_instructions(text))
    if role == "user":
        return Message.from_role_and_content(Role.USER, text)
    if role == "assistant":
        return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(_FINAL)
    raise RequestError(f"messages of the role {role!r} are not supported; use system, developer, user or assistant")


@contextmanager
def _vocabulary_of(tokenizer: Tokenizer) -> Iterator[None]:
    """Makes the library find a tokenizer's vocabulary, for as long as it loads it."""
    before = os.environ.get(_VOCABULARY_FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _VOCABULARY_FILE).write_bytes(_vocabulary(tokenizer))
        os.environ[_VOCABULARY_FOLDER] = folder
        try:
            yield
        finally:
            os.environ.pop(_VOCABULARY_FOLDER)
            if before is not None:
                os.environ[_VOCABULARY_FOLDER] = before


def _vocabulary(tokenizer: Tokenizer) -> bytes:
    """Writes a vocabulary as tiktoken does: a line for each token, its bytes in base64 and its rank."""
    byte_of = _bytes_of_characters()
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    lines = []
    for token, rank in sorted(vocabulary.items(), key=lambda item: item[1]):
        if rank in added:
            continue
        # A character that stands for no byte spoils the digest, which is what is to be found out.
        content = bytes(byte_of.get(character, 0) for character in token)
        lines.append(b"%s %d\n" % (base64.b64encode(content), rank))
    return b"".join(lines)


def _bytes_of_characters() -> dict[str, int]:
    """Maps each character of a byte-level tokenizer to its byte; invisible bytes have stand-in characters."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(moved)}
