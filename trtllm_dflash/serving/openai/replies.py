"""Replies and events of streams in OpenAI's form."""

import json
from dataclasses import astuple, dataclass, field

from trtllm_dflash.serving.openai.errors import ApiError

_DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass
class Usage:
    """A reply's token counts. OpenAI calls drafts predictions; rejected ones count in no total."""

    prompt_tokens: int
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def body(self) -> dict[str, object]:
        """Makes OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
            },
        }


@dataclass(frozen=True)
class ReplyForm:
    """The form of one reply: chat or plain, its id and options.

    Attributes:
        chat: a chat completion, else a plain one.
        include_usage: the stream ends with the usage.
    """

    chat: bool
    id: str
    created: int  # seconds since 1970
    model: str
    include_usage: bool = False
    _head: dict[str, object] = field(init=False, repr=False)
    _before_text: bytes = field(init=False, repr=False)  # of the event of a piece
    _after_text: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        object.__setattr__(self, "_head", head)
        name = "content" if self.chat else "text"
        without = self._chunk({"delta": {name: ""}} if self.chat else {name: ""}, None)
        # Inside a string, the model's name say, quotes are escaped: this is found once.
        before, colon, after = without.partition(f'"{name}":'.encode())
        object.__setattr__(self, "_before_text", before + colon)
        object.__setattr__(self, "_after_text", after.removeprefix(b'""'))

    def whole(self, replies: list[tuple[str, str]], usage: Usage) -> dict[str, object]:
        """Makes the body of replies that are not streamed, of the text and finish reason of each."""
        choices = []
        for index, (text, finish_reason) in enumerate(replies):
            said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": finish_reason})
        kind = {"object": "chat.completion"} if self.chat else {}
        return {**self._head, **kind, "choices": choices, "usage": usage.body()}

    def opening(self) -> bytes:
        """Makes the first event of a stream: in a chat, the role of its message."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.chat else b""

    def piece(self, text: str) -> bytes:
        """Makes the event of a piece of text. All else in it is the same in each, and made once."""
        return self._before_text + _JSON.encode(text).encode() + self._after_text

    def ending(self, finish_reason: str, usage: Usage) -> bytes:
        """Makes the events that end a stream."""
        events = self._chunk({"delta": {}} if self.chat else {"text": ""}, finish_reason)
        if self.include_usage:
            events += _event({**self._head, "choices": [], "usage": usage.body()})
        return events + _DONE

    def _chunk(self, said: dict[str, object], finish_reason: str | None) -> bytes:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.include_usage else {}
        return _event({**self._head, "choices": [choice], **usage})


def error_event(error: ApiError) -> bytes:
    """Makes the last events of a stream that an error ends after it has begun."""
    return _event(error.body()) + _DONE


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + _JSON.encode(body).encode() + b"\n\n"
