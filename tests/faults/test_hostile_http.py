"""The gateway's HTTP, before clients that mean it no good: malformed, endless, slow, or gone half-way."""

import asyncio
import http.client
import json
import logging
import random
import re
import socket
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import MappingProxyType

import pytest
import uvicorn
from starlette.requests import ClientDisconnect

from tests.serving.fake_triton import FakeTriton, fake_triton, response
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.serving import bodies
from trtllm_dflash.serving.front import Limits, configuration
from trtllm_dflash.serving.gateway import GatewaySettings, create_app
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.requests import ChatRequest, parse
from trtllm_dflash.text.tokenizer import TextCodec

pytestmark = pytest.mark.slow

GOOD = {"model": "tiny", "prompt": "A story:", "max_tokens": 4}
#: gRPC's own library writes one when a server goes before a connection to it does.
INFORMATION = re.compile(r"I\d{4} \d\d:")
#: Seconds: far below those of a limit that is not the test's.
SHORT = 0.5


@contextmanager
def front(engine, limits=None, script=None, **settings) -> Iterator[tuple[tuple[str, int], FakeTriton]]:
    """The gateway as `serve` starts it, over a Triton that says what the script does: its address, and that Triton."""
    with fake_triton(script or (lambda inputs: iter([response("fine", 4, "stop")]))) as (triton, url):
        app = create_app(GatewaySettings(engine=engine, triton_url=url, **settings))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(configuration(app, 2, limits))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                wait_until(lambda: server.started, "the gateway listens")
                yield listener.getsockname(), triton
            finally:
                server.should_exit = True
                thread.join()


def post(body: object, length: int | None = None, path: str = "/v1/completions", extra: str = "") -> bytes:
    """A request, whole; by default with the right length."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(data) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return (head + extra + "\r\n").encode() + data


def ask(address: tuple[str, int], body: object = GOOD) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    said = json.loads(reply.read())
    connection.close()
    return reply.status, said


def serves(address: tuple[str, int]) -> bool:
    status, reply = ask(address)
    return status == 200 and reply["choices"][0]["text"] == "fine"


def sent(address: tuple[str, int], *parts: bytes) -> socket.socket:
    client = socket.create_connection(address)
    client.settimeout(PATIENCE)
    for part in parts:
        client.sendall(part)
    return client


def until_closed(client: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    said = b""
    with client, suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            said += part
    return said


# -- 10,000 malformed requests -----------------------------------------------------------------------------------------

HEADERS = [b"Host: x", b"Content-Type: application/json", b"Transfer-Encoding: chunked", b"Expect: 100-continue"]
HOSTS = [b"Host: [", b"Host: a:b:c", b"Host: ", b"X: y"]
LENGTHS = [b"-1", b"0x10", b"1, 2", b"9" * 30, b"5\r\nContent-Length: 6", b"", b"1e3", b"4194305"]
CHUNKS = [b"5\r\nabcd\r\n", b"-1\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", b"1;x=\0\r\na\r\n", b"0\r\nX: y"]
VALUES: list[object] = [None, True, -1, 1e308, 10**40, "", "\ud800", "\0", [], [[]], {}, [{}], [1, "a"], "x" * 9999]
FIELDS = ["model", "prompt", "max_tokens", "temperature", "stop", "seed", "stream", "messages", "n", "\u2028"]


def noise(chance: random.Random) -> bytes:
    return chance.randbytes(chance.randrange(1, 400)) + b"\r\n\r\n"


def damaged(chance: random.Random) -> bytes:
    """A good request, of which some bytes are others, missing or twice."""
    data = bytearray(post(GOOD))
    for _ in range(chance.randrange(1, 9)):
        at = chance.randrange(len(data))
        data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
    return bytes(data[: chance.randrange(len(data))] if chance.random() < 0.3 else data)


def misframed(chance: random.Random) -> bytes:
    """A request whose body's length is a contradiction."""
    lines = [b"POST /v1/completions HTTP/1.1", *chance.sample(HEADERS, chance.randrange(1, 5)), chance.choice(HOSTS)]
    if chance.random() < 0.6:
        lines.append(b"Content-Length: " + chance.choice(LENGTHS))
    body = b"".join(chance.choices(CHUNKS, k=chance.randrange(1, 5)))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def overgrown(chance: random.Random) -> bytes:
    """A line or a header that is too long, or too many of them."""
    junk = chance.choice([b"a", b"\xff", b" ", b"%"]) * chance.randrange(1, 70_000)
    return chance.choice(
        [
            b"GET /" + junk + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + junk + b": b\r\n\r\n",
            b"GET / HTTP/1.1\r\nX: " + junk + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * chance.randrange(1, 8000) + b"\r\n",
        ]
    )


def misspelt(chance: random.Random) -> bytes:
    """Sound HTTP, and a body that is no request."""
    body = {**GOOD, chance.choice(FIELDS): chance.choice(VALUES)}
    data = json.dumps(body).encode()
    if chance.random() < 0.4:
        at = chance.randrange(len(data))
        data = data[:at] + chance.randbytes(2) + data[at + chance.randrange(3) :]
    if chance.random() < 0.05:
        data = b"[" * 20_000
    path = chance.choice(
        ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions/", "/v1/models", "/%2e%2e", "*"]
    )
    return post(data, path=path, extra="Connection: close\r\n")


async def throw(address: tuple[str, int], requests: list[bytes], statuses: Counter) -> None:
    """Sends each on a connection of its own, and reads what is answered; leaves some before that."""
    while requests:
        request = requests.pop()
        reader, writer = await asyncio.open_connection(*address)
        with suppress(OSError):  # it is closed while we send
            writer.write(request)
            if b"Connection: close" not in request:
                writer.write_eof()  # an unfinished one would be waited for
            if len(requests) % 8:
                reply = await reader.read()
                statuses[reply.split(b" ", 2)[1] if reply else b""] += 1
        writer.close()


def test_three_thousand_malformed_requests_end_nothing(tiny_engine, caplog, capfd):
    chance = random.Random(18)
    kinds = [noise, damaged, misframed, overgrown, misspelt]
    requests = [chance.choice(kinds)(chance) for _ in range(3_000)]
    statuses: Counter = Counter()

    async def all_of_them(address):
        await asyncio.gather(*(throw(address, requests, statuses) for _ in range(16)))

    with caplog.at_level(logging.ERROR), front(tiny_engine) as (address, _):
        asyncio.run(all_of_them(address))
        assert serves(address)
    assert not requests
    assert statuses[b"400"] > 600
    assert set(statuses) <= {b"", b"100", b"200", b"400", b"404", b"405", b"408", b"413", b"415"}
    said = [line for line in capfd.readouterr().err.splitlines() if not INFORMATION.match(line)]
    assert (caplog.text, said) == ("", [])  # nothing went wrong that had not been thought of


# -- endless, slow, or gone half-way -----------------------------------------------------------------------------------


def test_nine_megabytes_in_chunks_of_one_byte_are_refused_at_the_ten_thousandth(tiny_engine):
    head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", *HEADERS[:3], b"", b""])
    with front(tiny_engine) as (address, _):
        client = sent(address, head)
        with suppress(ConnectionError):  # it is closed while we send
            for _ in range(9 << 10):
                client.sendall(b"1\r\na\r\n" * 1024)
            pytest.fail("all of it was taken")
        assert until_closed(client).split(b" ")[1:2] in ([], [b"400"])  # the refusal, where it came through
        assert serves(address)


def test_half_open_connections_are_closed_in_time(tiny_engine):
    """A hundred that say nothing, do not end their headers or their body, or stay when they are answered."""
    done = post(GOOD)
    patient = 4 * SHORT  # enough for those who ask at once, on a busy machine too
    with front(tiny_engine, Limits(head_seconds=patient), body_timeout=patient) as (address, _):
        silent = [sent(address) for _ in range(25)]
        heads = [sent(address, done[:40]) for _ in range(25)]
        bodies = [sent(address, done[:-5]) for _ in range(25)]
        idle = [sent(address, done) for _ in range(25)]
        assert {until_closed(client) for client in silent + heads} == {b""}
        assert all(until_closed(client).startswith(b"HTTP/1.1 408 ") for client in bodies)
        assert all(until_closed(client).startswith(b"HTTP/1.1 200 ") for client in idle)
        assert serves(address)


@pytest.mark.parametrize(
    "long", [{"extra": "X-Long: " + "a" * 60_000 + "\r\n"}, {"path": "/" + "a" * 60_000}], ids=["header", "path"]
)
def test_a_head_that_comes_at_once_is_held_to_its_length_too(tiny_engine, long):
    with front(tiny_engine) as (address, _):
        reply = until_closed(sent(address, post(GOOD, **long)))
        assert reply.startswith(b"HTTP/1.1 400 ")
        refused = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]  # for clients, which read no other form
        assert (refused["type"], refused["message"]) == ("invalid_request_error", "Invalid HTTP request received.")
        assert serves(address)


def test_a_request_that_names_its_server_is_answered_as_one_that_does_not(tiny_engine):
    with front(tiny_engine, api_key="right") as (address, _):
        key = "Authorization: Bearer right\r\nConnection: close\r\n"
        for path, extra, status in (
            ("http://x/v1/completions", key, 200),
            ("HTTP://x:80/v1/completions?a=http://y/", key, 200),
            ("http://x/v1/completions", "Connection: close\r\n", 401),
            ("http://x/health", "Connection: close\r\n", 405),
            ("http://x", key, 404),
            ("/http://x/v1/completions", key, 404),
        ):
            reply = until_closed(sent(address, post(GOOD, path=path, extra=extra)))
            assert reply.split(b" ", 2)[1] == str(status).encode(), path


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(tiny_engine):
    with front(tiny_engine, Limits(head_seconds=SHORT)) as (address, _):
        client = sent(address)
        begin = time.monotonic()
        with pytest.raises(ConnectionError):
            for byte in post(GOOD) * 1000:
                client.sendall(bytes([byte]))
                time.sleep(SHORT / 20)
        assert time.monotonic() - begin < PATIENCE
        client.close()


def test_a_refused_request_cannot_go_on_with_its_body(tiny_engine):
    with front(tiny_engine, Limits(head_seconds=SHORT), api_key="right") as (address, _):
        client = sent(address, post(GOOD, length=1 << 20))
        with suppress(ConnectionError):
            for _ in range(1 << 20):
                client.sendall(b"a")
                time.sleep(SHORT / 20)
            pytest.fail("all of it was taken")
        client.close()


def test_a_reply_that_nobody_reads_is_ended(tiny_engine):
    def endless(inputs):
        while True:
            yield response("x" * (1 << 16), 1)

    with front(tiny_engine, Limits(unread_seconds=SHORT), endless) as (address, triton):
        client = sent(address, post({**GOOD, "stream": True}))
        assert triton.cancelled.wait(PATIENCE)
        client.close()


def test_more_connections_than_are_held_are_closed_at_once(tiny_engine):
    with front(tiny_engine, Limits(connections=8)) as (address, _):
        held = [sent(address) for _ in range(8)]
        assert until_closed(sent(address, post(GOOD))) == b""
        for client in held:
            client.close()
        wait_until(
            lambda: until_closed(sent(address, post(GOOD, extra="Connection: close\r\n"))), "there is room again"
        )


# -- bodies that are much work -----------------------------------------------------------------------------------------


def many(what: bytes, before: bytes, after: bytes) -> bytes:
    """A body of a megabyte of the same."""
    count = (1 << 20) // (len(what) + 1)
    return before + b",".join([what] * count) + after


BOMBS = {
    "faulty messages": many(b"{}", b'{"model":"tiny","messages":[', b"]}"),
    "messages that are none": many(b"1", b'{"model":"tiny","messages":[', b"]}"),
    "stops that are none": many(b"1", b'{"model":"tiny","messages":[{"role":"user","content":""}],"stop":[', b"]}"),
    "unknown fields": b'{"model":"tiny",' + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}",
    "brackets": b'{"model":"tiny","messages":' + b"[" * (1 << 20),
    "digits": b'{"model":"tiny","seed":' + b"9" * (1 << 20) + b"}",
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_a_body_full_of_faults_is_refused_for_the_work_of_one(body):
    """Not for that of listing all of its faults, which took seconds and hundreds of megabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refusal:
            parse(ChatRequest, body)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert refusal.value.status == 400


def test_six_prompts_of_four_megabytes_hold_up_nobody(tiny_engine, monkeypatch):
    """Nor would they if they were tokenized: their thread is not that of other requests."""
    long = {**GOOD, "prompt": "a b " * 1_000_000}
    with front(tiny_engine) as (address, _), ThreadPoolExecutor(6) as clients:
        refused = [client.result() for client in [clients.submit(ask, address, long) for _ in range(6)]]
        assert {status for status, _ in refused} == {400}
        assert {reply["error"]["code"] for _, reply in refused} == {"context_length_exceeded"}
        monkeypatch.setattr(TextCodec, "_check_length", lambda *_: None)
        waiting = [clients.submit(ask, address, {**GOOD, "prompt": "a b " * 100_000}) for _ in range(6)]
        served = 0
        while not all(client.done() for client in waiting):
            assert serves(address)
            served += 1
        assert served > 20


class Upload:
    """A request whose body comes in part, and goes on when it is told to."""

    headers = MappingProxyType({"content-type": "application/json"})

    def __init__(self, part: bytes) -> None:
        self.part, self.begun, self.goes_on = part, asyncio.Event(), asyncio.Event()

    async def stream(self):
        yield self.part
        self.begun.set()
        await self.goes_on.wait()
        raise ClientDisconnect


def test_bodies_together_are_bounded_and_let_go_of_when_their_clients_leave(monkeypatch):
    monkeypatch.setattr(bodies, "_BODIES", 2)

    async def scenario():
        reader = bodies.Bodies(100, PATIENCE)
        uploads = [Upload(b"a" * 100), Upload(b"a" * 100)]
        held = [asyncio.create_task(reader.process(upload, len)) for upload in uploads]
        await asyncio.gather(*(upload.begun.wait() for upload in uploads))
        with pytest.raises(ApiError) as refusal:
            await reader.process(Upload(b"a"), len)
        assert refusal.value.status == 503
        uploads[0].goes_on.set()
        with pytest.raises(ClientDisconnect):
            await held[0]
        late = Upload(b"a")
        waits = asyncio.create_task(reader.process(late, len))
        await late.begun.wait()
        for task in (held[1], waits):
            task.cancel()
        reader.close()

    asyncio.run(scenario())
