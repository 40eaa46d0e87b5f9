"""A reply over gRPC as it is written, from `ensemble`: one response a step."""

import argparse
import queue
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

QUESTION = "Eva is 5 times as old as Isaac, who is 6. Ivan is 8 years older than Eva. How old are the three together?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001", help="Triton's gRPC endpoint")
parser.add_argument("--prompt", default=PROMPT, help="raw text, chat markup included")
parser.add_argument("--max-tokens", type=int, default=128)
parser.add_argument("--no-draft", action="store_true", help="decode plainly")
arguments = parser.parse_args()


def tensor(name: str, kind: str, value: Any, dtype: Any) -> InferInput:
    """An input of one value."""
    made = InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return made


inputs = [
    tensor("text_input", "BYTES", arguments.prompt.encode(), object),
    tensor("max_tokens", "INT32", arguments.max_tokens, np.int32),
    tensor("stream", "BOOL", True, bool),
    tensor("draft", "BOOL", not arguments.no_draft, bool),
]
responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
drafted = accepted = 0

with InferenceServerClient(arguments.url) as client:
    try:
        client.is_server_live()  # says why there is none, which a stream may not
    except InferenceServerException as refusal:
        raise SystemExit(f"error: {arguments.url}: {refusal}") from None
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer("ensemble", inputs)
    finished = ""
    while not finished:
        result, error = responses.get()
        if error is not None:
            raise SystemExit(f"error: {error}")
        print(result.as_numpy("text_output").item().decode(), end="", flush=True)
        drafted = result.as_numpy("total_draft_tokens").item()
        accepted = result.as_numpy("total_accepted_draft_tokens").item()
        finished = result.as_numpy("finish_reason").item()

print(f"\n[{accepted} of {drafted} drafts accepted]")
