"""The gateway's side of HTTP connections: what of time and memory a client may take before it has said who it is.

Uvicorn and h11 speak the protocol. What they leave open is closed here: a connection that never asks, a body in a
million pieces, a reply that nobody reads.
"""

import asyncio
import json
import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trtllm_dflash.serving.openai.errors import ApiError

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True)
class Limits:
    """Limits of a connection. A client beyond one of them is disconnected, after a refusal where one can still be sent.

    Attributes:
        head_bytes: of a request's line and headers.
        head_seconds: until they are whole, from the start of the connection or the end of the reply before.
        body_pieces: chunks, or packets, in which a body arrives.
        unread_seconds: for which a client leaves a reply unread.
        connections: at a time; fewer where the process may open few files.
    """

    head_bytes: int = 32 << 10
    head_seconds: float = 10.0
    body_pieces: int = 10_000
    unread_seconds: float = 30.0
    connections: int = 4096


def configuration(app: "FastAPI", grace: int, limits: Limits | None = None) -> uvicorn.Config:
    """Makes uvicorn's configuration for the gateway.

    Args:
        grace: seconds that running replies get at the end.
    """
    limits = limits or Limits()
    return uvicorn.Config(
        app,
        http=partial(LimitedProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_level="error",  # a line for every malformed request would fill the disk
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=limits.head_bytes,
        timeout_keep_alive=max(1, round(limits.head_seconds)),
        timeout_graceful_shutdown=grace,
    )


class LimitedProtocol(H11Protocol):
    """A connection that ends where a client goes beyond its limits."""

    def __init__(self, *arguments: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limits = limits
        self._most = min(limits.connections, files // 2) if files > 0 else limits.connections
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self.conn = _Connection(limits, self._stop_timer)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self._most:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._start_timer()  # first: the next request may have come already, and stops it
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._start_timer()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(msg)
        else:  # the reply has begun, or is over
            self.transport.abort()
        if self.cycle is not None:  # a request whose body turned out malformed: its own reply would be a second one
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _refuse(self, message: str) -> None:
        """Tells that a request is none, in the form of the API's errors, and ends the connection."""
        body = json.dumps(ApiError(400, message).body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for part in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.DONE and self.flow.read_paused:
            # What comes before the reply has ended waits: but it is read, or the client's end would not be seen.
            if len(self.conn.trailing_data[0]) > self._limits.head_bytes:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.unread_seconds, self._look, self._left_unread())

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _look(self, before: int) -> None:
        """Disconnects a client that has read nothing of its reply since that many bytes were left."""
        left = self._left_unread()
        if left >= before:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self._limits.unread_seconds, self._look, left)

    def _left_unread(self) -> int:
        return self.transport.get_write_buffer_size()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._limits.head_seconds, self._time_out, math.inf)

    def _time_out(self, before: float) -> None:
        """Disconnects a client that is silent, unless it still reads its reply, of which so many bytes were left."""
        left = self._left_unread()
        if 0 < left < before:
            self._timer = self.loop.call_later(self._limits.unread_seconds, self._time_out, left)
        else:
            # Not `close`, which would wait until the client has read all that was written.
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Connection(h11.Connection):
    """h11's state of a connection. It counts the pieces of each body, and tells when a request's headers are whole."""

    def __init__(self, limits: Limits, on_request: Callable[[], None]) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._most_head_bytes = limits.head_bytes
        self._most_pieces = limits.body_pieces
        self._on_request = on_request
        self._pieces = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            # h11 itself looks at heads that have not come whole.
            head_bytes = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
            if head_bytes > self._most_head_bytes:
                raise h11.RemoteProtocolError("the headers are too long", error_status_hint=431)
            self._pieces = 0
            self._on_request()
        elif isinstance(event, h11.Data):
            self._pieces += 1
            if self._pieces > self._most_pieces:
                raise h11.RemoteProtocolError(f"the body comes in more than {self._most_pieces} pieces")
        return event
