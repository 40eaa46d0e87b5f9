"""Triton's model `tensorrt_llm_bls`: the ensemble's interface, answered once, many requests at a time."""

import gc
import json
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trtllm_dflash.errors import CancelledError, RequestError
from trtllm_dflash.serving import inner
from trtllm_dflash.serving.lifeline import hold_lifeline
from trtllm_dflash.serving.outbox import Outbox
from trtllm_dflash.serving.parameters import TEXT_NAMES, Fields, Tensors
from trtllm_dflash.serving.tensors import FINAL, error_response, parameter, read_tensors, response

#: Inputs of `preprocessing`, by their names here.
_TEXT_INPUTS = {
    "text_input": "QUERY",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
}
#: Inputs that no other model has.
_OWN_INPUTS = ("num_draft_tokens", "use_draft_logits")
_INNER_NAMES = {text: name for name, text in TEXT_NAMES.items() if name not in ("input_ids", "prompt")}


@dataclass(eq=False)
class Call:
    """A request on its way through the other models.

    Attributes:
        outputs: names of the requested tensors, in the order of the model's configuration.
        key: its name in the engine, once it has one.
        gone: set when its client has gone.
    """

    tensors: Tensors
    sender: Any
    outputs: list[str]
    request_id: str
    key: int = 0
    gone: threading.Event = field(default_factory=threading.Event)


class BLSModel:
    """The model: a thread waits for each request, and the engine runs them together."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Starts as many threads as the engine takes requests, and some for requests that it will refuse."""
        hold_lifeline()
        config = json.loads(arguments["model_config"])
        self._decoupled = parameter(config, "decoupled") == "true"
        self._outputs = [output["name"] for output in config["output"]]
        self._workers = ThreadPoolExecutor(int(parameter(config, "requests")), "dflash-call")
        self._stoppers = ThreadPoolExecutor(1, "dflash-stop")
        self._outbox = Outbox()

    def execute(self, requests: list[Any]) -> None:
        """Takes requests; their responses are sent later, when they are complete."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                requested = set(request.requested_output_names())
                outputs = [name for name in self._outputs if name in requested]
                call = Call(read_tensors(request), sender, outputs, request.request_id())
                self._outbox.put(partial(self._outbox.watch, sender, partial(self._cancel, call)))
                self._workers.submit(self._answer, call)
            except Exception as error:  # one request's fault is no other's
                self._send(sender, error_response(error))

    def finalize(self) -> None:
        """Waits for the requests under way: the engine answers all of them."""
        self._workers.shutdown(cancel_futures=True)
        self._stoppers.shutdown(cancel_futures=True)
        self._outbox.close()
        inner.finish()
        gc.collect()  # a response sender that is left to the interpreter's end crashes it

    def _answer(self, call: Call) -> None:
        try:
            answer = response(self._generate(call), call.outputs)
        except inner.InnerError as error:
            answer = error.response
        except Exception as error:
            if not isinstance(error, RequestError):
                traceback.print_exception(error)
            answer = error_response(error)
        self._send(call.sender, answer)

    def _generate(self, call: Call) -> Tensors:
        fields = Fields(call.tensors)
        fields.require("text_input")
        if fields.scalar("stream", False):
            raise fields.refusal("stream", "tensorrt_llm_bls answers once; use ensemble to stream")
        if fields.scalar("use_draft_logits", False):
            raise fields.refusal("use_draft_logits", "not supported: drafts are accepted by their tokens; leave it out")
        texts = {_TEXT_INPUTS[name]: tensor for name, tensor in call.tensors.items() if name in _TEXT_INPUTS}
        prompt = inner.infer("preprocessing", texts, ["INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_KEY"])
        call.key = int(prompt["REQUEST_KEY"].item())
        tensors = {
            _INNER_NAMES.get(name, name): tensor
            for name, tensor in call.tensors.items()
            if name not in _TEXT_INPUTS and name not in _OWN_INPUTS
        }
        tensors |= {
            "prompt": call.tensors["text_input"],
            "input_ids": prompt["INPUT_ID"],
            "input_lengths": prompt["REQUEST_INPUT_LEN"],
            "request_key": prompt["REQUEST_KEY"],
        }
        if "num_draft_tokens" in fields:  # how many are made is the scheduler's choice, as for every request
            if fields.scalar("num_draft_tokens") < 0:
                raise fields.refusal("num_draft_tokens", f"{fields.scalar('num_draft_tokens')}; give 0 or more")
            tensors.setdefault("draft", call.tensors["num_draft_tokens"] > 0)
        if call.gone.is_set():
            raise CancelledError("the request was cancelled")
        outputs = [name for name in call.outputs if name != "text_output"]
        wanted = ["output_text", *outputs]
        found = inner.infer(inner.ENGINE_MODEL, tensors, wanted, self._decoupled, call.request_id)
        return {**found, "text_output": found["output_text"].reshape(-1)}  # [1], as from `postprocessing`

    def _cancel(self, call: Call) -> None:
        """Cancels a request; called again until it is answered, since the engine may not have it yet."""
        call.gone.set()
        if call.key:
            self._stoppers.submit(inner.stop, call.key, self._decoupled)

    def _send(self, sender: Any, answer: Any) -> None:
        def send() -> None:
            self._outbox.unwatch(sender)
            sender.send(answer, flags=FINAL)

        self._outbox.put(send)
