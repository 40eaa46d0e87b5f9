"""The door of the gateway: who may come in, and how a request that may not is refused."""

import asyncio
import hmac
import re
import secrets
from collections.abc import Collection
from contextlib import suppress

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtllm_dflash.errors import ShutdownError
from trtllm_dflash.serving.gate import Gate
from trtllm_dflash.serving.openai.errors import ApiError

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
#: In front of a path, as to a proxy (RFC 9112, 3.2.2).
_SERVER = re.compile("^https?://[^/]*", re.IGNORECASE)
_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_PRIVATE_NETWORK = "access-control-{}-private-network"
_AGAIN_ELSEWHERE = {"Retry-After": "1", "Connection": "close"}
_LINGERING = 5.0  # seconds for which a request is read on that has been refused


class Door:
    """Middleware that gives each request an id, checks its API key, and refuses it where the gate is closed.

    Without a key, requests of web pages at other than these origins are refused, too: a browser keeps no page from
    a server whose name it gave itself, as one on this machine.
    """

    def __init__(self, app: ASGIApp, api_key: SecretStr | None, gate: Gate, origins: Collection[str] = ()) -> None:
        self._app = app
        self._gate = gate
        self._origins = origins
        self._key = None if api_key is None else api_key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = _SERVER.sub("", scope["path"])
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = scope["request_id"] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        origin = headers.get("origin")
        if self._key is None and origin is not None and origin not in self._origins and scope["path"] != "/health":
            page = origin[:128]
            message = f"web pages of {page} may not use this server: serve --openai-origin {page}, or with an API key"
            if page == "null":  # which would be every file and many a frame
                message = (
                    "web pages without an origin, such as files, may not use this server: open them over HTTP, and "
                    "name their origin by --openai-origin"
                )
            await refusal(ApiError(403, message, None, "origin_not_allowed"))(scope, receive, send_with_id)
        elif scope["path"] != "/health" and not self._admits(headers.get("authorization", "")):
            error = ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", None, "invalid_api_key", _CHALLENGE
            )
            await refusal(error)(scope, receive, send_with_id)
        elif not self._gate.open:
            # The connection ends with the reply, so that the client's next request may find another server.
            ending = str(ShutdownError("the server takes no more requests"))
            error = ApiError(503, ending, code="shutdown", headers=_AGAIN_ELSEWHERE)
            await LastReply(error.body(), error.status, error.headers)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _admits(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        # Headers are decoded as Latin-1; comparing takes the same time wherever the keys differ.
        return self._key is None or (
            scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        )


class Pages(CORSMiddleware):
    """Middleware that lets scripts of the pages at `allow_origins` use the API, also on loopback from the internet.

    Chromium's browsers ask that too for some years, in the question whether the page may use it at all.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answers what a browser asks before a page's request."""
        asked = _PRIVATE_NETWORK.format("request")
        others = [(name, value) for name, value in request_headers.raw if name != asked.encode()]
        response = super().preflight_response(Headers(raw=others))  # later releases refuse what asks that
        if asked in request_headers and response.status_code == 200:
            response.headers[_PRIVATE_NETWORK.format("allow")] = "true"
        return response


class LastReply(JSONResponse):
    """A reply with which a connection ends, before its request's body has been read.

    The client gets it at once, and may send on for a while: what would never be read resets the connection, and most
    clients then tell of that alone.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replies, then reads."""

        async def send_whole(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await super().__call__(scope, receive, send_whole)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_rest(receive), _LINGERING)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _rest(receive: Receive) -> None:
    """Reads a request to its end."""
    while (await receive()).get("more_body"):
        pass


def refusal(error: ApiError) -> Response:
    """Makes the reply that an error is."""
    return (LastReply if error.status == 413 else JSONResponse)(error.body(), error.status, error.headers)


async def refused(request: Request, error: Exception) -> Response:
    """Replies to a request that is refused, or whose path or method is not there."""
    if isinstance(error, ApiError):
        return refusal(error)
    assert isinstance(error, HTTPException)  # no such path, or not this method
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    path = request.scope["path"]  # request.url has the header Host in it, which may be anything
    return refusal(ApiError(error.status_code, f"{request.method} {path}: {error.detail}", None, code, error.headers))


async def broken(request: Request, error: Exception) -> Response:
    """Replies where the gateway itself has failed."""
    # Starlette raises the error again afterwards, so that the server logs it.
    request_id = request.scope.get("request_id", "")
    message = f"the server failed; its log says why (request {request_id})"
    return refusal(ApiError(500, message, code="internal", headers={"X-Request-Id": request_id}))
