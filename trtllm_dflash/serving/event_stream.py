"""Replies to a client that may leave: server-sent events, and work that ends with its connection."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")

_PIECE = 64 << 10  # bytes


class EventStream(Response):
    """Server-sent events. An ApiError before the first is an ordinary refusal with its own status."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send), None)

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            body = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class PiecewiseReply(Response):
    """JSON that is sent as the client reads it; `ended` is called when it is sent, or its client gone."""

    media_type = "application/json"

    def __init__(self, body: bytes, ended: Callable[[], None]) -> None:
        super().__init__(body)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self.body), _PIECE):
                await send({"type": "http.response.body", "body": self.body[at : at + _PIECE], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._ended()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T], otherwise: _T) -> _T:
    """Awaits the work while the client is connected; cancels it and returns `otherwise` once the client has gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = worker, watcher = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else otherwise
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
