"""Harmony, gpt-oss's chat format, through OpenAI's own library.

A conversation becomes tokens with a system message that says who the model is, how hard it is to think and what day it
is. A reply has channels: `analysis`, which is its thinking, `commentary`, in which functions are called, and `final`,
which is what the user is meant to read.

The library needs its vocabulary as a file, which it would download. The checkpoint's tokenizer has the same vocabulary:
the file is written from that, and the library compares its digest with the one it knows. Nothing is downloaded.
"""

import base64
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from openai_harmony import (
    Author,
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
    TextContent,
    ToolDescription,
    load_harmony_encoding,
)
from tokenizers import Tokenizer

from trtllm_dflash.errors import EngineError, RequestError
from trtllm_dflash.text.reply.parts import Parser, Part, PartKind
from trtllm_dflash.text.stream import TextStream, special_tokens
from trtllm_dflash.text.token_text import bytes_of_characters

#: Tokens by which its tokenizer is known.
_TOKENS = {"<|return|>": 200002, "<|channel|>": 200005, "<|start|>": 200006, "<|message|>": 200008}
_VOCABULARY_FILE = "o200k_base.tiktoken"
_VOCABULARY_FOLDER = "TIKTOKEN_ENCODINGS_BASE"  # where the library looks for it
#: What the system message takes, as a chat template takes variables.
ARGUMENTS = ("reasoning_effort", "model_identity", "conversation_start_date")
#: The efforts that it has words for.
EFFORTS = ("low", "medium", "high")
_FINAL, _ANALYSIS, _COMMENTARY = "final", "analysis", "commentary"
_FUNCTIONS = "functions."  # before a function's name
_ROLES = ("system", "developer", "user", "assistant", "tool")
_INSTRUCTORS = ("system", "developer")  # whose message is none where it is empty
_LONG = 1024  # characters of a word: the library takes the square of their number, and all of Python waits for it
_LONGEST = 4096  # where words cannot be cut
# Words are parts of runs of one of these kinds: neither blanks nor digits, or blanks; and lines' ends with slashes.
_KINDS = (r"[^\s\d]", r"\s", r"[\r\n/]")
# Longer runs, looked for where they begin: from each of their characters on, all that follow would be read again.
_LONG_WORD, _LONGEST_WORD = (
    re.compile("|".join(rf"(?<!{kind}){kind}{{{most + 1},}}" for kind in _KINDS)) for most in (_LONG, _LONGEST)
)
_LONG_REST = re.compile("|".join(rf"{kind}{{{_LONG + 1},}}" for kind in _KINDS))  # of a run, behind one of another kind
_END_OF_WORD = re.compile(r"(?<=[^\W\d_])(?=[^\w\s])")  # a letter, and what is none: one begins with that


_USER, _ASSISTANT, _DEVELOPER = (Author(role=role) for role in (Role.USER, Role.ASSISTANT, Role.DEVELOPER))


class Harmony:
    """Harmony's encoder and parser for one tokenizer."""

    def __init__(self, encoding: HarmonyEncoding, tokenizer: Tokenizer) -> None:
        self._encoding = encoding
        self._tokenizer = tokenizer
        self._hidden = frozenset(special_tokens(tokenizer))

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

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Encodes a conversation as token ids, up to where the assistant's reply begins.

        Args:
            messages: with roles user, assistant, tool, and system or developer, whose text is the developer's
                instructions; in OpenAI's form.
            arguments: `reasoning_effort` (low, medium, high), `model_identity`, `conversation_start_date` (today).
            tools: functions that may be called, in OpenAI's form.

        Raises:
            RequestError: a role or an argument is not known, or a tool's result names no call.
        """
        system = Message.from_role_and_content(Role.SYSTEM, _system(arguments))
        rest = _messages([message for message in messages if message["content"] or message["role"] not in _INSTRUCTORS])
        if tools:
            _offer(tools, rest)
        conversation = Conversation.from_messages([system, *rest])
        try:
            return list(self._encoding.render_conversation_for_completion(conversation, Role.ASSISTANT))
        except ValueError as error:  # a schema that is nested too deeply
            raise RequestError(f"this conversation cannot be written in Harmony: {error}") from None

    def reply(self, stop: tuple[str, ...] = ()) -> TextStream:
        """Starts the text of a reply's final channel, which grows as tokens arrive; see `TextStream`."""
        return _FinalText(self.parser(None), self._tokenizer, stop, self._hidden)

    def parser(self, functions: Collection[str] | None) -> "HarmonyParser":
        """Starts taking a reply apart; see `HarmonyParser`."""
        return HarmonyParser(self._encoding, self._tokenizer, self._hidden, functions)


class HarmonyParser(Parser):
    """Takes a reply's tokens apart by Harmony's channels.

    Args:
        hidden: tokens that are no text.
        functions: that are offered: messages to functions are calls, to others than these too. None: they count as
            thinking, as messages to other tools do.
    """

    def __init__(
        self,
        encoding: HarmonyEncoding,
        tokenizer: Tokenizer,
        hidden: frozenset[int],
        functions: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self._parser: StreamableParser | None = StreamableParser(encoding, Role.ASSISTANT)
        self._is_content = False
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._functions = functions
        self._header: list[int] | None = []  # the tokens so far, while no message has begun
        self._text = self._new_text()  # of the message that is being read
        self._kind: PartKind = "content"

    def read(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        for token in token_ids:
            self._push(token)
        return self._take()

    def finish(self) -> list[Part]:
        # A header of Harmony's that was cut short says nothing; a text in which none of its tokens came is no Harmony.
        if self._header is not None and not set(self._header) & set(_TOKENS.values()):
            self._take_as_it_is()
        self._end_message()
        return self._take()

    def _push(self, token: int) -> None:
        if self._parser is None:
            self._show(token)
            return
        was_content, is_special = self._is_content, token in self._hidden
        if was_content and not is_special:
            self._show(token)  # which the library would keep, and write out with its state each time it is asked for it
            return
        try:
            self._parser.process(token)
        except HarmonyError:
            self._take_as_it_is(token)
            return
        if is_special:  # others change nothing
            self._is_content = self._parser.state is StreamState.CONTENT
        is_content = self._is_content
        if is_content:
            self._header = None
        elif self._header is not None:
            self._header.append(token)
        # Neither the token that opens the content nor the one that ends it is part of it.
        if was_content and is_content:
            self._show(token)
        elif is_content:
            self._begin_message(self._parser.current_channel, self._parser.current_recipient)
        elif was_content:
            self._end_message()
            if self._is_empty and self._kind == "arguments":
                self._parts.append(Part("arguments", "{}"))

    def _begin_message(self, channel: str | None, recipient: str | None) -> None:
        self._text, self._is_empty = self._new_text(), True
        before, self._kind = self._kind, "thinking"
        # The library takes a type that stands alone for the recipient, and a second channel for a part of its name.
        recipient = recipient and recipient.partition("<|")[0]
        name = self._called(recipient)
        if name:
            self._kind = "arguments"
            self._parts.append(Part("call", name))
        elif channel == _FINAL or (recipient is None and channel != _ANALYSIS):
            self._kind = "content"  # the answer, or a word about the calls that follow it
        if self._kind == before != "arguments" and self._shown:
            self._parts.append(Part(before, "\n"))

    def _called(self, recipient: str | None) -> str | None:
        """Returns the function that a message goes to; one that is offered may be named without its namespace."""
        if recipient is None or self._functions is None:
            return None
        if recipient.startswith(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._functions else None

    def _new_text(self) -> TextStream:
        return TextStream(self._tokenizer, hidden=self._hidden)

    def _show(self, token: int) -> None:
        self._text.push(token)
        self._release()

    def _end_message(self) -> None:
        self._text.finish()
        self._release()

    def _release(self) -> None:
        text = self._text.release()
        if text:
            self._shown, self._is_empty = True, False
            self._parts.append(Part(self._kind, text))

    def _take_as_it_is(self, *tokens: int) -> None:
        """Shows a reply that is not Harmony as it is: from here on all of it, and all before if none was shown yet."""
        self._parser = None
        if self._kind != "content":
            self._end_message()
            self._text, self._kind = self._new_text(), "content"
        header, self._header = self._header or [], None
        for token in (*header, *tokens):
            self._show(token)

    _shown = False  # anything yet
    _is_empty = True  # the message that is being read, so far


class _FinalText(TextStream):
    """Keeps the text of a reply that its reader is meant to see."""

    def __init__(
        self, parser: HarmonyParser, tokenizer: Tokenizer, stop: tuple[str, ...], hidden: frozenset[int]
    ) -> None:
        super().__init__(tokenizer, stop, hidden)
        self._parser = parser

    def push(self, token: int) -> None:
        self._add(self._parser.read("", [token]))

    def finish(self) -> None:
        self._add(self._parser.finish())
        self.flush()

    def _add(self, parts: list[Part]) -> None:
        for part in parts:
            if part.kind == "content":
                self.append(part.text)


def _system(arguments: Mapping[str, Any]) -> SystemContent:
    unknown = sorted(set(arguments) - set(ARGUMENTS))
    if unknown:
        raise RequestError(f"chat argument {unknown[0]!r} is not known to Harmony; known: {', '.join(ARGUMENTS)}")
    effort = str(arguments.get("reasoning_effort", "medium")).lower()
    if effort not in EFFORTS:
        raise RequestError(f"reasoning_effort {arguments['reasoning_effort']!r}: choose low, medium or high")
    content = SystemContent.new().with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    for name in set(arguments) & {"model_identity", "conversation_start_date"}:
        if len(str(arguments[name])) > _LONGEST:
            raise RequestError(f"chat argument {name!r} is longer than {_LONGEST} characters")
    if "model_identity" in arguments:
        content = content.with_model_identity(str(arguments["model_identity"]))
    return content.with_conversation_start_date(str(arguments.get("conversation_start_date", date.today())))


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    written: list[Message] = []
    names: dict[str, str] = {}  # of functions, by the id of their call
    for message in messages:
        role, text = message["role"], message["content"]
        if role in _INSTRUCTORS:
            written.append(_instructions(text))
        elif role == "user":
            written.append(_message(_USER, text))
        elif role == "assistant":
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
            written += _reply(message)
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name"))
            if name is None:
                raise RequestError(f"the result of call {message.get('tool_call_id')!r}: there is no such call")
            result = _message(Author.new(Role.TOOL, _FUNCTIONS + name), text)
            written.append(result.with_channel(_COMMENTARY).with_recipient("assistant"))
        else:
            raise RequestError(f"messages of the role {role!r} are not supported; use {', '.join(_ROLES)}")
    return written


def _message(author: Author, text: str) -> Message:
    """Writes a text, long words of it in parts, which are encoded one by one."""
    return Message(author=author, content=[TextContent(text=part) for part in _parts(text)])


def _instructions(text: str) -> Message:
    if any(_long_words(text)):
        return _message(_DEVELOPER, "# Instructions\n\n" + text)  # as the library writes them
    return Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_instructions(text))


def _long_words(text: str) -> Iterator[tuple[int, int]]:
    """Finds where long words begin and end."""
    end = 0
    while word := _LONG_REST.match(text, end) or _LONG_WORD.search(text, end):
        end = word.end()
        yield word.span()


def _parts(text: str) -> Iterator[str]:
    """Cuts long words, where that changes no token if there is such a place: in front of a sign behind a letter."""
    begin = 0
    for at, end in _long_words(text):
        while end - at > _LONG:
            window = text[at + 1 : at + 1 + _LONG]
            ends = [match.start() for match in _END_OF_WORD.finditer(window)]
            at += 1 + ends[-1] if ends else _LONG
            yield text[begin:at]
            begin = at
    yield text[begin:]


def _reply(message: Mapping[str, Any]) -> list[Message]:
    """Writes an assistant's message: its thinking, which the library leaves out once it is answered, text and calls."""
    calls = message.get("tool_calls", ())
    written = []
    if message.get("reasoning_content"):
        thinking = _message(_ASSISTANT, message["reasoning_content"])
        written.append(thinking.with_channel(_ANALYSIS))
    if message["content"] or not calls:
        text = _message(_ASSISTANT, message["content"])
        written.append(text.with_channel(_COMMENTARY if calls else _FINAL))
    for call in calls:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        asked = _message(_ASSISTANT, text).with_channel(_COMMENTARY)
        asked = asked.with_recipient(_FUNCTIONS + call["function"]["name"])
        written.append(asked.with_content_type("<|constrain|>json"))
    return written


def _offer(tools: Sequence[Mapping[str, Any]], messages: list[Message]) -> None:
    """Adds functions to the developer's first message, or as one of its own before all others."""
    try:
        written = json.dumps(tools, ensure_ascii=False)
    except RecursionError:
        raise RequestError("a schema is nested too deeply", "tools") from None
    if _LONGEST_WORD.search(written):
        raise RequestError(f"a word of more than {_LONGEST} characters in what describes a function", "tools")
    described = [
        ToolDescription.new(function["name"], function.get("description", ""), function.get("parameters"))
        for function in (tool["function"] for tool in tools)
    ]
    alone = DeveloperContent.new().with_function_tools(described)
    for message in messages:
        content = message.content[0]
        if isinstance(content, DeveloperContent):
            content.with_function_tools(described)
            return
        if message.author.role == Role.DEVELOPER:  # in parts
            message.content += [TextContent(text="\n\n"), alone]
            return
    messages.insert(0, Message.from_role_and_content(Role.DEVELOPER, alone))


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
    byte_of = bytes_of_characters()
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
