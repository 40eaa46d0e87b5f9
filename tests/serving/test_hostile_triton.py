"""Triton's own ports, before clients that mean it no good: what they may not ask for, and prompts without end."""

import json
import re
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow


def ask(url: str, body: object = None) -> tuple[int, str]:
    """A reply of Triton's HTTP: its status and text."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=PATIENCE) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


REGION = {"key": "/none", "offset": 0, "byte_size": 64}
SHUT_OFF = {
    "systemsharedmemory/status": None,
    "systemsharedmemory/region/mine/register": REGION,
    "systemsharedmemory/unregister": {},
    "cudasharedmemory/status": None,
    "cudasharedmemory/region/mine/register": {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64},
    "cudasharedmemory/unregister": {},
    "repository/index": {},
    "repository/models/ensemble/load": {},
    "repository/models/ensemble/unload": {},
    "logging": {"log_verbose_level": 1},
    "trace/setting": {"trace_level": ["TIMESTAMPS"]},
    "models/ensemble/trace/setting": {"trace_level": ["TIMESTAMPS"]},
}


@pytest.mark.parametrize("path", SHUT_OFF)
def test_dangerous_interfaces_are_shut_off_on_http(server, path):
    status, text = ask(f"{server.http_url}/v2/{path}", SHUT_OFF[path])
    assert (status, "This API is restricted" in text) == (403, True)


def test_dangerous_interfaces_are_shut_off_on_grpc_for_who_knows_the_rule_too(server):
    from tritonclient.grpc import InferenceServerClient, InferenceServerException

    words = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    (rule,) = [word for word in words if word.startswith("--grpc-restricted-protocol=")]
    value = rule.rpartition("=")[2]
    client = InferenceServerClient(server.grpc_url)
    for name, arguments in (
        ("register_system_shared_memory", ("mine", "/none", 64)),
        ("register_cuda_shared_memory", ("mine", b"\0" * 64, 0, 64)),
        ("get_system_shared_memory_status", ()),
        ("unregister_system_shared_memory", ()),
        ("get_model_repository_index", ()),
        ("load_model", ("ensemble",)),
        ("unload_model", ("ensemble",)),
        ("get_log_settings", ()),
        ("get_trace_settings", ()),
    ):
        for headers in (None, {"triton-grpc-protocol-no": f"client={value}"}):
            with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                getattr(client, name)(*arguments, headers=headers)
    client.close()
    # Written by hand, since no client sends it: the only header that would do is none that a server reads.
    assert b"is restricted" in raw_call(server.grpc_url, "triton-grpc-protocol-no", value)
    assert b"Missing :method" in raw_call(server.grpc_url, "triton-grpc-protocol-no:client", value)


def raw_call(address: str, name: str, value: str) -> bytes:
    """What Triton answers to a call for the status of shared memory with one more header, whatever its name."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/inference.GRPCInferenceService/SystemSharedMemoryStatus",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        name: value,
    }
    words = [word.encode() for field in fields.items() for word in field]
    lines = [bytes([len(word)]) + word for word in words]  # HPACK: literals, as they are
    headers = b"".join(b"\0" + key + text for key, text in zip(lines[::2], lines[1::2], strict=True))
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers))
        client.sendall(frame(0, 1, 1, bytes(5)))
        said = b""
        while b"grpc-message" not in said or len(said.partition(b"grpc-message")[2]) < 20:
            part = client.recv(4096)
            assert part, said
            said += part
    return said


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def test_the_models_own_memory_is_not_registered_nor_written_to(server):
    """Triton 2.51 would let whoever registers it change what its Python models exchange (CVE-2025-23319)."""
    maps = Path(f"/proc/{server.pid}/maps").read_text()
    key = re.findall(r"/dev/shm(/trtllm-dflash-\S+)", maps)[0]
    url = f"{server.http_url}/v2/systemsharedmemory/region/mine/register"
    assert ask(url, {"key": key, "offset": 0, "byte_size": 64})[0] == 403
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
    most = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    where = {"parameters": {"shared_memory_region": "mine", "shared_memory_byte_size": 64}}
    status, error = ask(f"{server.http_url}/v2/models/tensorrt_llm_bls/infer", {"inputs": [{**text, **where}, most]})
    assert (status, "Unable to find shared memory region" in error) == (404, True)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_prompts_of_four_megabytes_are_refused_by_their_bytes_in_triton_too(server, model):
    url = f"{server.http_url}/v2/models/{model}/generate"
    with ThreadPoolExecutor(6) as clients:
        replies = list(clients.map(lambda _: ask(url, {"text_input": "a b " * 1_000_000, "max_tokens": 1}), range(6)))
    assert {status for status, _ in replies} == {400}
    assert all("the prompt has more than 2047 tokens; the limit is 2047" in text for _, text in replies)
    assert server.complete("A story:", max_tokens=4)
