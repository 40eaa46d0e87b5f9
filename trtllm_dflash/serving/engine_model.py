"""Triton's model `tensorrt_llm`: the engine, token ids in, token ids and text out."""

import gc
import json
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import DFlashError, RequestError
from trtllm_dflash.llm import LLM
from trtllm_dflash.runtime.request import Completion, Update
from trtllm_dflash.runtime.service import Ticket
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.serving.log import log_to_triton
from trtllm_dflash.serving.metrics import Metrics
from trtllm_dflash.serving.outbox import Outbox, end_process
from trtllm_dflash.serving.parameters import TEXT_NAMES, EngineRequest, Fields, Tensors, parse_request
from trtllm_dflash.serving.tensors import (
    FINAL,
    error_response,
    parameter,
    read_tensors,
    response,
    string_tensor,
    wants_codes,
)
from trtllm_dflash.session.choice import Kernels
from trtllm_dflash.session.threads import limit_threads


@dataclass(eq=False)
class Reply:
    """A request on its way through the engine; belongs to the outbox's thread.

    Attributes:
        key: with which another model of the repository may end it; 0: none does.
        outputs: names of the requested tensors.
        coded: its errors begin with their code.
        tokens: of the reply, so far.
    """

    asked: EngineRequest
    sender: Any
    outputs: set[str]
    key: int
    coded: bool
    tokens: int = 0
    ticket: Ticket | None = None
    cancelled: bool = False


class EngineModel:
    """The model: all requests run together in one service. Under tensor parallelism only rank 0 gets requests."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Loads the engine that the model's configuration names."""
        config = json.loads(arguments["model_config"])
        engine = Path(parameter(config, "engine"))
        self._decoupled = parameter(config, "decoupled") == "true"
        self._echo = parameter(config, "exclude_input_in_output") == "false"
        log_to_triton()
        limit_threads(read_config(engine))
        kernels: Kernels = "torch" if parameter(config, "kernels") == "torch" else "auto"
        self._llm = LLM.load(engine, parameter(config, "device"), kernels, prepare=False)
        if self._llm.session.communicator.rank != 0:
            threading.Thread(target=self._follow, name="dflash-rank", daemon=True).start()
            return
        texts = {name: parameter(config, name) for name in ServiceSettings.model_fields}
        self._service = self._llm.service(ServiceSettings.model_validate(texts))
        self._metrics = Metrics(lambda: self._service.statistics().samples(), pb_utils)
        self._replies: set[Reply] = set()
        self._by_key: dict[int, Reply] = {}
        self._outbox = Outbox(self._look_around)

    def execute(self, requests: list[Any]) -> None:
        """Takes requests; the outbox sends their responses."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except Exception as error:  # one request's fault is no other's
                self._refuse(sender, error, wants_codes(request))

    def finalize(self) -> None:
        """Fails the requests that are left, and closes the engine."""
        if self._llm.session.communicator.rank == 0:
            self._service.close()
            self._outbox.close()
            self._metrics.close()
        self._llm.close()
        gc.collect()  # a response sender that is left to the interpreter's end crashes it

    # -- on Triton's thread ------------------------------------------------------------------------------------------

    def _take(self, request: Any, sender: Any) -> None:
        tensors = read_tensors(request)
        key = int(tensors["request_key"].item()) if "request_key" in tensors else 0
        if "stop" in tensors and tensors["stop"].any():
            if not key:
                raise RequestError("stop: not supported; cancel the stream, or the call, that the request came with")
            self._outbox.put(lambda: self._stop(key, sender))
            return
        fields = Fields(tensors, TEXT_NAMES if "prompt" in tensors else None)
        asked = parse_request(fields, self._decoupled, self._echo)
        reply = Reply(asked, sender, set(request.requested_output_names()), key, wants_codes(request))
        self._outbox.put(lambda: self._begin(reply))
        try:
            ticket = self._service.submit(
                asked.prompt_ids,
                asked.params,
                lambda update: self._outbox.put(lambda: self._send(reply, update)),
                draft=asked.draft,
                priority=asked.priority,
                deadline=asked.deadline,
            )
            self._outbox.put(lambda: self._taken(reply, ticket))
        except DFlashError as error:
            refusal = Update(error=fields.refusal_of(error))
            self._outbox.put(lambda: self._send(reply, refusal))

    def _refuse(self, sender: Any, error: Exception, coded: bool) -> None:
        if not isinstance(error, DFlashError):
            traceback.print_exception(error)
        self._outbox.put(lambda: sender.send(error_response(error, coded), flags=FINAL))

    # -- on the outbox's thread --------------------------------------------------------------------------------------

    def _begin(self, reply: Reply) -> None:
        self._replies.add(reply)
        if reply.key:
            self._by_key[reply.key] = reply
        else:
            self._outbox.watch(reply.sender, lambda: self._cancel(reply))

    def _taken(self, reply: Reply, ticket: Ticket) -> None:
        reply.ticket = ticket
        if reply.cancelled:
            self._service.cancel(ticket)

    def _cancel(self, reply: Reply) -> None:
        reply.cancelled = True
        if reply.ticket is not None:
            self._service.cancel(reply.ticket)

    def _stop(self, key: int, sender: Any) -> None:
        reply = self._by_key.get(key)
        if reply is not None:
            self._cancel(reply)
        sender.send(response({"request_key": np.array([[key]], np.int64)}, ["request_key"]), flags=FINAL)

    def _send(self, reply: Reply, update: Update) -> None:
        ended = update.completion is not None or update.error is not None
        reply.tokens += len(update.token_ids)
        if update.error is not None:
            reply.sender.send(error_response(update.error, reply.coded), flags=FINAL)
        elif ended or reply.asked.streaming:
            tensors = self._tensors(reply, update)
            reply.sender.send(response(tensors, reply.outputs), flags=FINAL if ended else 0)
        if ended:
            self._end(reply)

    def _end(self, reply: Reply) -> None:
        self._replies.discard(reply)
        reply.ticket = None  # which knows the reply: a circle
        self._by_key.pop(reply.key, None)
        self._outbox.unwatch(reply.sender)
        self._metrics.request_ended()

    def _look_around(self) -> None:
        self._metrics.advance()
        if self._service.failure is not None and not self._replies:
            # Triton has no way for a model to say that it is ill; that its process has ended is seen and acted upon.
            end_process(self._service.failure)

    def _tensors(self, reply: Reply, update: Update) -> Tensors:
        """Makes a response's outputs, [1, ...]: of one step where the reply is streamed, else of the whole."""
        asked, done = reply.asked, update.completion
        ids, text = update.token_ids, update.text
        if not asked.streaming:
            assert done is not None
            ids, text = done.token_ids, done.text or ""
            if asked.echo:
                ids, text = asked.prompt_ids + ids, self._prompt_text(asked) + text
        rate = update.accepted_tokens / update.drafted_tokens if update.drafted_tokens else 0.0
        numbers = {
            "sequence_length": len(ids),
            "sequence_index": 0,
            "batch_index": 0,
            "total_accepted_draft_tokens": update.accepted_tokens,
            "total_draft_tokens": update.drafted_tokens,
            "num_input_tokens": len(asked.prompt_ids),
            "num_output_tokens": reply.tokens,
        }
        return {
            "output_ids": np.array([[ids]], np.int32),
            "output_text": string_tensor([text]),
            "finish_reason": string_tensor([done.finish_reason if done is not None else ""]),
            "acceptance_rate": np.array([[rate]], np.float32),
            # Log probabilities are refused where they are asked for; clients that read them nonetheless find zeros.
            "cum_log_probs": np.zeros((1, 1), np.float32),
            "output_log_probs": np.zeros((1, 1, len(ids)), np.float32),
            "request_key": np.array([[reply.key]], np.int64),
            **{name: np.array([[number]], np.int32) for name, number in numbers.items()},
            **_times(done if asked.perf else None),
        }

    def _prompt_text(self, asked: EngineRequest) -> str:
        if asked.prompt is not None or self._llm.codec is None:
            return asked.prompt or ""
        return self._llm.codec.decode(asked.prompt_ids)

    # -- ranks beyond the first --------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Follows rank 0's steps. Without this rank the others wait for ever, so its end is its server's end."""
        try:
            self._llm.session.follow()
        except BaseException as error:
            traceback.print_exc()
            end_process(f"this rank failed: {error}")
        sys.stdout.flush()
        os._exit(0)


def _times(completion: Completion | None) -> Tensors:
    """Makes the outputs of times: nanoseconds since the epoch, 0 where they are not known, or not requested."""
    times = completion.times if completion is not None else None
    values = {
        "arrival_time_ns": times.arrival_ns if times else 0,
        "first_scheduled_time_ns": times.first_scheduled_ns if times else 0,
        "first_token_time_ns": times.first_token_ns if times else 0,
        "last_token_time_ns": times.last_token_ns if times else 0,
    }
    return {name: np.array([[value]], np.int64) for name, value in values.items()}
