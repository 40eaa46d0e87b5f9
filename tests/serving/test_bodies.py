"""Long bodies whose tokens alone are asked for: they take their own time, and the place of nobody's prompt."""

import asyncio
import threading

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from trtllm_dflash.serving import bodies
from trtllm_dflash.serving.bodies import Bodies
from trtllm_dflash.serving.openai.errors import ApiError

LONG = b"x" * (65 << 10)


def request(body):
    async def receive():
        return {"type": "http.request", "body": body}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


class Client:
    """Reads replies once it may."""

    def __init__(self):
        self.may = asyncio.Event()
        self.read = b""

    async def send(self, message):
        await self.may.wait()
        self.read += message.get("body", b"")


def many(body):
    return {"count": len(body), "tokens": list(range(len(body))), "token_strs": ["é"] * len(body), "none": None}


def test_a_reply_is_the_json_that_was_made_of_its_body():
    async def ask():
        held, client = Bodies(100_000, 20.0), Client()
        client.may.set()
        reply = await held.convert(request(LONG), many)
        await reply({}, None, client.send)
        assert client.read == JSONResponse(many(LONG)).body
        assert reply.headers["content-length"] == str(len(client.read))
        assert (await held.convert(request(b"xx"), many)).body == JSONResponse(many(b"xx")).body
        held.close()

    asyncio.run(ask())


def test_few_long_replies_wait_for_clients_that_do_not_read():
    async def ask():
        held, client = Bodies(100_000, 20.0), Client()
        replies = [await held.convert(request(LONG), many) for _ in range(bodies.MOST_ASIDE)]
        sending = [asyncio.create_task(reply({}, None, client.send)) for reply in replies]
        with pytest.raises(ApiError, match="at a time") as refusal:
            await held.convert(request(LONG), many)
        assert (refusal.value.status, refusal.value.headers) == (503, {"Retry-After": "1"})
        assert await held.process(request(LONG), len) == len(LONG)  # a prompt to reply to
        assert (await held.convert(request(b"xx"), many)).body
        client.may.set()
        await asyncio.gather(*sending)
        with pytest.raises(ZeroDivisionError):
            await held.convert(request(LONG), lambda _: 1 // 0)
        for _ in range(bodies.MOST_ASIDE):
            assert (await held.convert(request(LONG), many)).body
        held.close()

    asyncio.run(ask())


def test_what_counts_tokens_for_long_holds_up_no_prompt():
    async def ask():
        held, go_on, begun = Bodies(100_000, 20.0), threading.Event(), threading.Event()

        def work(body):
            begun.set()
            go_on.wait()
            return {}

        slow = asyncio.create_task(held.convert(request(LONG), work))
        await asyncio.to_thread(begun.wait)
        assert await held.process(request(LONG), len) == len(LONG)
        go_on.set()
        await slow
        held.close()

    asyncio.run(ask())
