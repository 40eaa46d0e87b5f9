"""One whole reply over gRPC, from `tensorrt_llm_bls`: the served model that answers with a single response."""

import argparse

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

QUESTION = "Eva is 5 times as old as Isaac, who is 6. Ivan is 8 years older than Eva. How old are the three together?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001", help="Triton's gRPC endpoint")
parser.add_argument("--prompt", default=PROMPT, help="raw text, chat markup included")
parser.add_argument("--max-tokens", type=int, default=128)
arguments = parser.parse_args()

text = InferInput("text_input", [1, 1], "BYTES")
text.set_data_from_numpy(np.array([[arguments.prompt.encode()]], dtype=object))
max_tokens = InferInput("max_tokens", [1, 1], "INT32")
max_tokens.set_data_from_numpy(np.array([[arguments.max_tokens]], dtype=np.int32))
without_prompt = InferInput("exclude_input_in_output", [1, 1], "BOOL")
without_prompt.set_data_from_numpy(np.array([[True]]))

try:
    with InferenceServerClient(arguments.url) as client:
        result = client.infer("tensorrt_llm_bls", [text, max_tokens, without_prompt])
except InferenceServerException as error:
    raise SystemExit(f"error: {arguments.url}: {error}") from None

print(result.as_numpy("text_output").item().decode())
drafted, accepted = (result.as_numpy(f"total_{kind}_tokens").item() for kind in ("draft", "accepted_draft"))
print(f"[{accepted} of {drafted} drafts accepted]")
