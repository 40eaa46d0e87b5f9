"""Requests on their way through the engine: each choice of a reply, whole or as events of a stream."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from trtllm_dflash.serving.client import Piece, TokenRequest, TritonClient
from trtllm_dflash.serving.openai.errors import ApiError, as_api_error
from trtllm_dflash.serving.openai.logprobs import Scored
from trtllm_dflash.serving.openai.replies import Added, Form, Reply, Usage
from trtllm_dflash.text.reply.parts import Parser, Part, StoppedParts
from trtllm_dflash.text.stream import TextStream

_AHEAD = 2  # pieces of each choice that are kept for a client that reads slowly


class Choice:
    """One reply of a request.

    Args:
        request: to the engine.
        parser: of its text and tokens.
        stop: texts that end it and that the engine does not look for.
        most_calls: of tools; None is any number.
        counts_prompt: False where another choice has the same prompt, and counts it.
        end_ids: tokens that end replies and are no part of them.
        echo: the prompt's text, where the reply repeats it.
        only_prompt: the reply is no more than that; what the engine has to generate is left out.
        only_calls: it is held to calls of tools: what is cut off before one has begun is not content.
        text: decodes its tokens one by one, where it may end amid those of a piece: what follows is not its own. The
            request then wants ids.

    Attributes:
        index: its place among the request's choices.
        reason: "" until it has ended.
    """

    def __init__(
        self,
        request: TokenRequest,
        parser: Parser,
        stop: tuple[str, ...] = (),
        most_calls: int | None = None,
        counts_prompt: bool = True,
        index: int = 0,
        end_ids: frozenset[int] = frozenset(),
        echo: str | None = None,
        only_calls: bool = False,
        only_prompt: bool = False,
        text: TextStream | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.reason = ""
        self.usage = Usage(len(request.token_ids) if counts_prompt else 0)
        self._parser = parser
        self._shown = StoppedParts(stop, most_calls)
        self._calls = False
        self._end_ids = end_ids
        self._echo = echo
        self._only_calls = only_calls
        self._only_prompt = only_prompt
        self._text = text
        self._scored_prompt: list[Scored] = []
        self._unread_tokens = 0  # of pieces whose text is kept back: part of a character, or of a marker
        self._thinks = False  # as of the last text

    def read(self, piece: Piece) -> Added:
        """Adds a piece; returns what it adds to the reply."""
        if self._only_prompt:
            piece = _without_reply(piece)
        parts: list[Part] = []
        shown: list[Part] = []
        taken = 0
        for text, ids, last in self._portions(piece):
            taken += len(ids)
            new = self._parse(text, ids, last)
            parts += new
            shown += self._shown.take(new, last)
            if self._shown.stopped and self._text is not None:
                piece = _cut(piece, taken)
                break
        self.usage.count(piece)
        self._count_thinking(piece, parts)
        self._calls = self._calls or any(part.kind == "call" for part in shown)
        self.reason = "stop" if self._shown.stopped else piece.finish_reason
        if self.reason == "stop" and self._calls:
            self.reason = "tool_calls"
        # Of the first token there is none: a prompt of that alone has nothing to wait for.
        alone = self.request.params.prompt_logprobs is not None and len(self.request.token_ids) == 1
        if piece.prompt_logprobs or alone:
            first, *others = self.request.token_ids
            self._scored_prompt = [Scored(first, None), *map(Scored, others, piece.prompt_logprobs)]
        # As they are now: a choice of several is read ahead of its client.
        usage = replace(self.usage, prompt_tokens=len(self.request.token_ids))
        return Added(shown, self._scored(piece), usage, self.reason, [its.logprob for its in piece.logprobs])

    def _count_thinking(self, piece: Piece, parts: list[Part]) -> None:
        """Counts a piece that is thinking alone, with those before it whose text was kept back until now."""
        self._unread_tokens += piece.tokens
        kinds = {part.kind for part in parts}
        self._thinks = parts[-1].kind == "thinking" if parts else self._thinks
        if kinds == {"thinking"} or (piece.finish_reason and not kinds and self._thinks):
            self.usage.thinking_tokens += self._unread_tokens
        if kinds:
            self._unread_tokens = 0

    def _portions(self, piece: Piece) -> Iterator[tuple[str, list[int], bool]]:
        """Yields a piece's text and tokens, and whether they are the reply's last: whole, or token by token."""
        ended = bool(piece.finish_reason)
        if self._text is None:
            yield piece.text, piece.token_ids, ended
            return
        for token in piece.token_ids:
            self._text.push(token)
            yield self._text.release(), [token], False
        if ended:
            self._text.finish()
            yield self._text.release(), [], True

    def _parse(self, text: str, ids: list[int], last: bool) -> list[Part]:
        parts = self._parser.read(text, ids)
        if last:
            parts += self._parser.finish()
        return [part for part in parts if not (self._only_calls and part.kind == "content")]

    def _scored(self, piece: Piece) -> list[Scored]:
        scored = [Scored(token, its) for token, its in zip(piece.token_ids, piece.logprobs, strict=False)]
        ended = piece.finish_reason == "stop" and scored and scored[-1].token in self._end_ids
        return scored[:-1] if ended else scored

    async def added(self, triton: TritonClient) -> AsyncGenerator[tuple["Choice", Added], None]:
        """Yields what each of the engine's responses adds to the reply."""
        async with aclosing(triton.stream(self.request)) as pieces:
            async for piece in pieces:
                added = self.read(piece)
                enough = self.reason and not piece.finish_reason  # the engine would go on
                if enough:  # before the client has its end, and may leave
                    await triton.finish(self.request)
                yield self, added
                if enough:
                    break

    async def reply(self, triton: TritonClient) -> Reply:
        """Reads the whole reply."""
        reply = Reply(prompt=self._echo)
        async with aclosing(self.added(triton)) as stream:
            async for _, added in stream:
                reply.add(added)
        reply.reason = self.reason
        reply.scored_prompt = self._scored_prompt
        return reply


@dataclass(frozen=True)
class Job:
    """A request, ready for the engine, and the form of its reply.

    Attributes:
        best: of each so many choices in a row, the replies to show: the likeliest; None: all.
        form_field, functions, implied: see `as_api_error`.
        count_field: that says how many choices there are.
    """

    choices: tuple[Choice, ...]
    form: Form
    stream: bool
    best: tuple[int, int] | None = None
    form_field: str = "response_format"
    functions: tuple[str, ...] = ()
    count_field: str = "n"
    implied: Mapping[str, str] = field(default_factory=dict)

    async def whole(self, triton: TritonClient) -> dict[str, object]:
        """Returns the body of the whole reply.

        Raises:
            ApiError: the server has refused or failed one of the choices, or never takes so many.
        """
        await self._check_room(triton)
        tasks = [asyncio.create_task(choice.reply(triton)) for choice in self.choices]
        try:
            replies = await asyncio.gather(*tasks)
        except Exception as error:
            raise self._refusal(error) from None
        finally:
            for task in tasks:  # where one has failed, nobody reads the others
                task.cancel()
        if self.best is not None:
            most, shown = self.best
            groups = [replies[at : at + most] for at in range(0, len(replies), most)]
            replies = [one for group in groups for one in sorted(group, key=_likelihood)[:shown]]
        return self.form.whole(replies, self._usage())

    async def events(self, triton: TritonClient) -> AsyncGenerator[bytes, None]:
        """Yields the reply's events, some at a time. Raises an ApiError only before the first."""
        await self._check_room(triton)
        begun: set[int] = set()
        ended: set[int] = set()
        try:
            async with aclosing(_merged([choice.added(triton) for choice in self.choices])) as merged:
                async for choice, added in merged:
                    events = b"" if choice.index in begun else self.form.opening(choice.index)
                    begun.add(choice.index)
                    events += self.form.added(choice.index, added)
                    if added.reason and choice.index not in ended:
                        ended.add(choice.index)
                        events += self.form.ending(choice.index, added.reason)
                        if len(ended) == len(self.choices):
                            events += self.form.closing(self._usage())
                    if events:
                        yield events
        except Exception as error:
            refusal = self._refusal(error)
            if not begun:
                raise refusal from None
            yield self.form.failing(refusal)

    async def _check_room(self, triton: TritonClient) -> None:
        """Refuses more choices than the server ever takes: it would turn some away whenever they come."""
        room = await triton.room() if len(self.choices) > 1 else None
        if room is None or len(self.choices) <= sum(room):
            return
        slots, queue = room
        message = (
            f"{self.count_field}: {len(self.choices)} replies at a time; the server takes {slots + queue}, of which "
            f"{slots} have a slot (build --max-batch) and {queue} wait (--max-queue)"
        )
        raise ApiError(400, message, self.count_field)

    def _refusal(self, error: Exception) -> ApiError:
        request_id = self.choices[0].request.request_id
        return as_api_error(error, request_id, self.form_field, self.functions, self.implied)

    def _usage(self) -> Usage:
        first, *others = (choice.usage for choice in self.choices)
        return sum(others, first)


_Stream = AsyncGenerator[tuple[Choice, Added], None]


async def _merged(streams: list[_Stream]) -> _Stream:
    """Yields what all choices yield, as it comes. Where one fails, the others end."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    queue: asyncio.Queue[tuple[Choice, Added] | Exception | None] = asyncio.Queue(_AHEAD * len(streams))

    async def feed(stream: _Stream) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cut(piece: Piece, tokens: int) -> Piece:
    """Leaves out of a piece what follows its first tokens."""
    return replace(piece, tokens=tokens, token_ids=piece.token_ids[:tokens], logprobs=piece.logprobs[:tokens])


def _without_reply(piece: Piece) -> Piece:
    """Leaves out of a piece what the engine generated."""
    return replace(
        piece, text="", tokens=0, token_ids=[], logprobs=[], finish_reason="length" if piece.finish_reason else ""
    )


def _likelihood(reply: Reply) -> float:
    return -reply.mean_logprob
