"""Bodies of requests on their way to tokens: how many bytes are held at a time, and which threads work on them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from fastapi import Request, Response

from trtllm_dflash.serving.event_stream import PiecewiseReply
from trtllm_dflash.serving.openai.errors import ApiError

_T = TypeVar("_T")

_THREADS = 2
_LONG = 64 << 10  # bytes: a body beyond takes long enough to make others wait
_BODIES = 64  # of the largest size, that are held at a time
_SLICE = 8192  # values of a list that are written at a time: no other thread runs meanwhile
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: Long bodies to convert at a time, from the reading to the end of the reply, which may have ten times their bytes.
MOST_ASIDE = 8


class Bodies:
    """Reads bodies and hands them to threads. Long ones share one thread, so that they hold up no short ones.

    Args:
        most: bytes of a body.
        seconds: in which it must have come.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._held = 0  # bytes of all bodies that are being read or wait for their thread
        self._short = ThreadPoolExecutor(_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")
        self._aside = ThreadPoolExecutor(1, "tokenize-aside")
        self._converted = 0  # long bodies that are being converted, or whose reply is not sent whole

    def close(self) -> None:
        """Ends the threads; what waits for one is cancelled."""
        for pool in (self._short, self._long, self._aside):
            pool.shutdown(wait=False, cancel_futures=True)

    async def process(self, request: Request, work: Callable[[bytes], _T]) -> _T:
        """Reads a request's body, and returns what `work` makes of it on a thread.

        Raises:
            ApiError: the body is too long, does not come, is no JSON by its headers, or too many are held.
            ClientDisconnect: the client has gone.
        """
        async with self._read(request) as body:
            pool = self._long if len(body) > _LONG else self._short
            return await asyncio.get_running_loop().run_in_executor(pool, work, body)

    async def convert(self, request: Request, work: Callable[[bytes], dict[str, object]]) -> Response:
        """Reads a request's body, and replies with what `work` makes of it on a thread.

        It may be of any length, and take its time: long ones have a thread of their own, and hold up no prompt.

        Raises:
            ApiError, ClientDisconnect: as in `process`.
        """
        async with self._read(request) as body:
            if len(body) <= _LONG:
                return Response(await self._written(self._short, work, body), media_type="application/json")
            if self._converted == MOST_ASIDE:
                raise _too_many()
            self._converted += 1
            try:
                return PiecewiseReply(await self._written(self._aside, work, body), self._end_conversion)
            except BaseException:
                self._end_conversion()
                raise

    async def _written(
        self, pool: ThreadPoolExecutor, work: Callable[[bytes], dict[str, object]], body: bytes
    ) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: _json(work(body)))

    def _end_conversion(self) -> None:
        self._converted -= 1

    @asynccontextmanager
    async def _read(self, request: Request) -> AsyncIterator[bytes]:
        # Another type would let any web page that a user of this machine opens post here.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: Content-Type: application/json", "Content-Type")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"Content-Encoding {encoding[:64]}: send the body as it is", "Content-Encoding")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._most:
            raise self._too_long()
        body = bytearray()
        try:
            try:
                await asyncio.wait_for(self._receive(request, body), self._seconds)
            except asyncio.TimeoutError:
                message = f"the body was not there after {self._seconds:g} s, which is fixed"
                raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Reads the body, and refuses it as soon as it is too long, whatever Content-Length says."""
        async with aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                self._held += len(chunk)
                if len(body) > self._most:
                    raise self._too_long()
                if self._held > _BODIES * self._most:
                    raise _too_many()

    def _too_long(self) -> ApiError:
        message = f"the body is longer than {self._most:,} bytes; that limit is fixed"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _too_many() -> ApiError:
    return ApiError(503, "too many long requests at a time", code="unavailable", headers={"Retry-After": "1"})


def _json(values: dict[str, object]) -> bytes:
    """Writes an object whose lists may be very long."""
    fields = [
        f"{_JSON.encode(name)}:{_list(value) if isinstance(value, list) else _JSON.encode(value)}"
        for name, value in values.items()
    ]
    return f"{{{','.join(fields)}}}".encode()


def _list(values: list[object]) -> str:
    slices = (_JSON.encode(values[at : at + _SLICE])[1:-1] for at in range(0, len(values), _SLICE))
    return f"[{','.join(slices)}]"
