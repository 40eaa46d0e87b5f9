"""Replies and events of streams in the form of OpenAI's completions."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from trtllm_dflash.serving.client import Piece
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.logprobs import CompletionLogprobs, Scored, of_chat, of_prompt
from trtllm_dflash.text.reply.parts import Part, PartKind
from trtllm_dflash.text.token_text import TokenTexts

#: An assistant's thinking in messages and chunks: the name that most clients read, and vLLM's newer one.
THINKING = ("reasoning_content", "reasoning")

_DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
#: What ends a line for Unicode and for some clients, and none of an event's for its standard.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\u0085\u2028\u2029"}


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
        self.accepted_tokens = min(piece.accepted_tokens, self.completion_tokens)  # a reply may end amid a step's
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
    """A call of a function.

    Attributes:
        pieces: of its arguments.
    """

    name: str
    pieces: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Added:
    """Parts and tokens that one of the engine's responses adds to a reply.

    Attributes:
        scored: the new tokens, where log-probabilities are asked for.
        usage: of its choice so far.
        reason: why its choice ends with it; "": it does not.
        logprobs: of the new tokens, one that ends the reply among them.
    """

    parts: list[Part]
    scored: list[Scored] = field(default_factory=list)
    usage: Usage | None = None
    reason: str = ""
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Reply:
    """A whole reply.

    Attributes:
        prompt: text of the prompt, where the reply repeats it; None: it does not.
        pieces: of its thinking and its content.
        last: the kind of its last part.
        scored, scored_prompt: tokens, where log-probabilities are asked for.
        logprobs: of its tokens, then, one that ends it among them.
    """

    pieces: dict[PartKind, list[str]] = field(default_factory=lambda: {"thinking": [], "content": []})
    calls: list[Call] = field(default_factory=list)
    reason: str = ""
    prompt: str | None = None
    last: PartKind | None = None
    scored: list[Scored] = field(default_factory=list)
    scored_prompt: list[Scored] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def thinking(self) -> str:
        return "".join(self.pieces["thinking"])

    @property
    def content(self) -> str:
        return "".join(self.pieces["content"])

    @property
    def mean_logprob(self) -> float:
        """The mean of its tokens' log-probabilities, by which the best of several is found."""
        return sum(self.logprobs) / max(1, len(self.logprobs))

    def add(self, added: Added) -> None:
        """Adds what a response adds."""
        self.scored += added.scored
        self.logprobs += added.logprobs
        for part in added.parts:
            self.last = part.kind
            if part.kind == "call":
                self.calls.append(Call(part.text))
            else:
                kept = self.calls[-1].pieces if part.kind == "arguments" else self.pieces[part.kind]
                kept.append(part.text)


class Form(ABC):
    """The form of a reply's body, or of the events of its stream."""

    @abstractmethod
    def whole(self, replies: list[Reply], usage: Usage) -> dict[str, object]:
        """Makes the body of a reply that is not streamed, of its choices."""

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Makes the events that begin a choice."""

    @abstractmethod
    def added(self, index: int, added: Added) -> bytes:
        """Makes the events of what a response adds to a choice."""

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
        tells_usage: each chunk has its choice's usage so far, as vLLM's `continuous_usage_stats`.
        texts: of tokens, where log-probabilities are asked for.
        prompts: with those of the prompts, as vLLM has them.
    """

    def __init__(
        self,
        model: str,
        chat: bool,
        include_usage: bool = False,
        texts: TokenTexts | None = None,
        prompts: bool = False,
        tells_usage: bool = False,
    ) -> None:
        self._tokens = texts
        self._prompts = prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._chat = chat
        self._include_usage = include_usage
        self._tells_usage = tells_usage
        self._usage: Usage | None = None  # of the choice whose chunks are made
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = {"thinking": THINKING, "content": ("content" if chat else "text",)}
        self._around: dict[tuple[int, tuple[str, ...]], list[bytes]] = {}  # the places of a piece of text, in its event
        self._calls: dict[int, int] = {}  # of each choice, so far

    def whole(self, replies: list[Reply], usage: Usage) -> dict[str, object]:
        choices = []
        for index, reply in enumerate(replies):
            said = {"message": _message(reply)} if self._chat else {"text": (reply.prompt or "") + reply.content}
            prompt = [] if reply.prompt is None else reply.scored_prompt
            logprobs = self._logprobs_of(index, reply.scored, prompt, reply.prompt)
            choice: dict[str, object] = {"index": index, **said, "logprobs": logprobs, "finish_reason": reply.reason}
            if self._prompts and self._tokens is not None:
                choice["prompt_logprobs"] = of_prompt(reply.scored_prompt, self._tokens)
            choices.append(choice)
        kind = {"object": "chat.completion"} if self._chat else {}
        return {**self._head, **kind, "choices": choices, "usage": usage.body()}

    def opening(self, index: int) -> bytes:
        self._usage = None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self._chat else b""

    def added(self, index: int, added: Added) -> bytes:
        self._usage = added.usage
        if not added.scored:
            return b"".join(self._part(index, part) for part in added.parts)
        # With the first text, or with none: not all that the tokens stand for may be known yet.
        first = next((at for at, part in enumerate(added.parts) if part.kind == "content"), len(added.parts))
        before, rest = added.parts[:first], added.parts[first:]
        text = rest[0].text if rest else ""
        said: dict[str, object] = {"delta": {"content": text} if rest else {}} if self._chat else {"text": text}
        events = [self._part(index, part) for part in before]
        events.append(self._chunk(index, said, logprobs=self._logprobs_of(index, added.scored)))
        return b"".join(events + [self._part(index, part) for part in rest[1:]])

    def _logprobs_of(
        self, index: int, scored: list[Scored], prompt: Sequence[Scored] = (), echo: str | None = None
    ) -> dict[str, object] | None:
        if self._tokens is None or not (scored or prompt):
            return None
        if self._chat:
            return of_chat(scored, self._tokens)
        return self._logprobs.setdefault(index, CompletionLogprobs(self._tokens)).body(scored, prompt, echo)

    def ending(self, index: int, reason: str) -> bytes:
        return self._chunk(index, {"delta": {}} if self._chat else {"text": ""}, reason)

    def closing(self, usage: Usage) -> bytes:
        body: dict[str, object] = {**self._head, "choices": [], "usage": usage.body()}
        return event(body) + _DONE if self._include_usage else _DONE

    def _part(self, index: int, part: Part) -> bytes:
        if part.kind in self._texts:
            return _json(part.text).join(self._text_event(index, self._texts[part.kind]))
        if part.kind == "call":
            self._calls[index] = self._calls.get(index, 0) + 1
            call = Call(part.text)
            said = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        else:
            said = {"function": {"arguments": part.text}}
        return self._chunk(index, {"delta": {"tool_calls": [{"index": self._calls[index] - 1, **said}]}})

    def _text_event(self, index: int, names: tuple[str, ...]) -> list[bytes]:
        """Makes the event of a piece of text, around the places of it: all else is the same in each, but its usage."""
        around = self._around.get((index, names))
        if around is None:
            said: dict[str, object] = dict.fromkeys(names, "")
            around, rest = [], self._chunk(index, {"delta": said} if self._chat else said)
            for name in names:
                # Inside a string, the model's name say, quotes are escaped: this is found once.
                before, colon, rest = rest.partition(f'"{name}":'.encode())
                around.append(before + colon)
                rest = rest.removeprefix(b'""')
            around.append(rest)
            if not self._tells_usage:
                self._around[index, names] = around
        return around

    def _chunk(
        self,
        index: int,
        said: dict[str, object],
        finish_reason: str | None = None,
        logprobs: dict[str, object] | None = None,
    ) -> bytes:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        so_far = self._usage.body() if self._tells_usage and self._usage is not None else None
        usage = {"usage": so_far} if self._include_usage or self._tells_usage else {}
        return event({**self._head, "choices": [choice], **usage})


def _message(reply: Reply) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.thinking:
        message |= dict.fromkeys(THINKING, reply.thinking)
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def event(body: Mapping[str, object], name: str = "") -> bytes:
    """Makes a server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + _json(body) + b"\n\n"


def _json(value: object) -> bytes:
    """Writes JSON on what any client takes for one line."""
    text = _JSON.encode(value)
    return (text if text.isascii() else text.translate(_LINE_ENDS)).encode()
