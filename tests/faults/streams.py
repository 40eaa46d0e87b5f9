"""Clients that stream, each on a thread, and what each of them saw in the end."""

import http.client
import json
import queue
import threading
import time
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as triton

from tests.waiting import PATIENCE

#: A text that takes long: as many tokens as fit, one a step.
LONG = {"max_tokens": 1500, "ignore_eos": True, "draft": False}


C = TypeVar("C", bound="Client")


class Client:
    """A request on a thread of its own.

    Attributes:
        begun: set with the first of its text, and at its end.
        status: of an HTTP reply.
        said: what it got: an HTTP body, or a gRPC error.
        ended: when, on the clock of `time.monotonic`; None while it runs.
    """

    def __init__(self, url: str, **values: object) -> None:
        self.begun = threading.Event()
        self.status: int | None = None
        self.said = ""
        self.ended: float | None = None
        self._url = url
        self._values = values
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def joined(self: "C") -> "C":
        """This client, once it has ended."""
        self._thread.join(PATIENCE)
        assert self.ended is not None, "it hangs"
        return self

    def request(self) -> None:
        """Makes the request and reads all of the reply."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self.request()
        except (OSError, http.client.HTTPException) as error:  # the server has gone
            self.said += f"{type(error).__name__}: {error}"
        finally:
            self.ended = time.monotonic()
            self.begun.set()


class GrpcStream(Client):
    """A stream of the model `ensemble`; said is the error's text."""

    def request(self) -> None:
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        with triton.InferenceServerClient(self._url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            values = {"text_input": b"Count.", "stream": True, **LONG, **self._values}
            inputs = [_tensor(name, value) for name, value in values.items()]
            with suppress(triton.InferenceServerException):  # the stream broke before: it says so to the callback
                client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
            while True:
                result, error = answers.get(timeout=PATIENCE)
                if error is not None:
                    self.said = str(error)
                    return
                self.begun.set()
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return


class OpenAIStream(Client):
    """A streamed completion; said is the whole body, as far as it came."""

    def request(self) -> None:
        connection = post(self._url + "/completions", {**completion(self._values), "stream": True})
        reply = connection.getresponse()
        self.status = reply.status
        while line := reply.readline().decode():
            self.said += line
            self.begun.set()

    @property
    def events(self) -> list[str]:
        """What came after each `data: `."""
        return [line.removeprefix("data: ") for line in self.said.splitlines() if line]


def completion(values: dict[str, object]) -> dict[str, object]:
    """The body of a completion that takes long."""
    return {"model": "tiny", "prompt": "Count.", **LONG, **values}


def post(url: str, body: dict[str, object]) -> http.client.HTTPConnection:
    """Sends a body of JSON; the reply is still to be read."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=PATIENCE)
    connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def _tensor(name: str, value: object) -> triton.InferInput:
    kind, dtype = {bytes: ("BYTES", object), bool: ("BOOL", np.bool_), int: ("INT32", np.int32)}[type(value)]
    tensor = triton.InferInput(name, [1, 1], kind)
    tensor.set_data_from_numpy(np.array([[value]], dtype))
    return tensor
