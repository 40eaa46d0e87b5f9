"""Replies and events of streams in the form of OpenAI's completions."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from trtllm_dflash.serving.client import Piece
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.text.reply.parts import Part

_DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass
class Usage:
    """A reply's token counts. OpenAI calls drafts predictions; rejected ones count in no total."""

    prompt_tokens: int
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    thinking_tokens: int = 0  # of responses that had nothing else in them
    cached_tokens: int = 0  # of the prompt, whose K/V rows an earlier request had left

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def count(self, piece: Piece) -> None:
        """Counts a piece of the reply."""
        self.completion_tokens += piece.tokens
        self.drafted_tokens = piece.drafted_tokens
        self.accepted_tokens = piece.accepted_tokens
        self.cached_tokens = min(piece.reused_tokens, self.prompt_tokens)  # 0 where another choice counts the prompt

    def body(self) -> dict[str, object]:
        """Makes OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.thinking_tokens,
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
            },
        }


@dataclass
class Call:
    """A call of a function."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass
class Reply:
    """A whole reply."""

    thinking: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    reason: str = ""

    def add(self, parts: list[Part]) -> None:
        """Adds parts to it."""
        for part in parts:
            if part.kind == "thinking":
                self.thinking += part.text
            elif part.kind == "content":
                self.content += part.text
            elif part.kind == "call":
                self.calls.append(Call(part.text))
            else:
                self.calls[-1].arguments += part.text


class Form(ABC):
    """The form of a reply's body, or of the events of its stream."""

    @abstractmethod
    def whole(self, replies: list[Reply], usage: Usage) -> dict[str, object]:
        """Makes the body of a reply that is not streamed, of its choices."""

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Makes the events that begin a choice."""

    @abstractmethod
    def parts(self, index: int, parts: list[Part]) -> bytes:
        """Makes the events of what comes of a choice."""

    @abstractmethod
    def ending(self, index: int, reason: str) -> bytes:
        """Makes the events that end a choice."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """Makes the events that end the stream."""

    def failing(self, error: ApiError) -> bytes:
        """Makes the last events of a stream that an error ends after it has begun."""
        return event(error.body()) + _DONE


class CompletionForm(Form):
    """The form of a completion, in a chat or not.

    Args:
        model: its name.
        include_usage: the stream ends with the usage.
    """

    def __init__(self, model: str, chat: bool, include_usage: bool = False) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = {"thinking": "reasoning_content", "content": "content" if chat else "text"}
        self._around: dict[tuple[int, str], tuple[bytes, bytes]] = {}  # a piece of text, in its event
        self._calls: dict[int, int] = {}  # of each choice, so far

    def whole(self, replies: list[Reply], usage: Usage) -> dict[str, object]:
        choices = []
        for index, reply in enumerate(replies):
            said = {"message": _message(reply)} if self._chat else {"text": reply.content}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": reply.reason})
        kind = {"object": "chat.completion"} if self._chat else {}
        return {**self._head, **kind, "choices": choices, "usage": usage.body()}

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self._chat else b""

    def parts(self, index: int, parts: list[Part]) -> bytes:
        return b"".join(self._part(index, part) for part in parts)

    def ending(self, index: int, reason: str) -> bytes:
        return self._chunk(index, {"delta": {}} if self._chat else {"text": ""}, reason)

    def closing(self, usage: Usage) -> bytes:
        body: dict[str, object] = {**self._head, "choices": [], "usage": usage.body()}
        return event(body) + _DONE if self._include_usage else _DONE

    def _part(self, index: int, part: Part) -> bytes:
        if part.kind in self._texts:
            before, after = self._text_event(index, self._texts[part.kind])
            return before + _JSON.encode(part.text).encode() + after
        if part.kind == "call":
            self._calls[index] = self._calls.get(index, 0) + 1
            call = Call(part.text)
            said = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        else:
            said = {"function": {"arguments": part.text}}
        return self._chunk(index, {"delta": {"tool_calls": [{"index": self._calls[index] - 1, **said}]}})

    def _text_event(self, index: int, name: str) -> tuple[bytes, bytes]:
        """Makes the event of a piece of text, before the text and after it: all else is the same in each."""
        if (index, name) not in self._around:
            empty = self._chunk(index, {"delta": {name: ""}} if self._chat else {name: ""})
            # Inside a string, the model's name say, quotes are escaped: this is found once.
            before, colon, after = empty.partition(f'"{name}":'.encode())
            self._around[index, name] = before + colon, after.removeprefix(b'""')
        return self._around[index, name]

    def _chunk(self, index: int, said: dict[str, object], finish_reason: str | None = None) -> bytes:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._head, "choices": [choice], **usage})


def _message(reply: Reply) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def event(body: Mapping[str, object], name: str = "") -> bytes:
    """Makes a server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + _JSON.encode(body).encode() + b"\n\n"
