"""Triton's model `tensorrt_llm`: the engine, token ids in, token ids and text out."""

import gc
import json
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from pydantic import ValidationError

from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import CancelledError, DFlashError, RequestError, SettingsError
from trtllm_dflash.llm import LLM
from trtllm_dflash.runtime.request import TokenLogprobs, Update, fault_of
from trtllm_dflash.runtime.service import Ticket
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.serving.choice_fields import choice_values
from trtllm_dflash.serving.drain import DrainListener
from trtllm_dflash.serving.lifeline import hold_lifeline
from trtllm_dflash.serving.log import log_to_triton
from trtllm_dflash.serving.metrics import Metrics
from trtllm_dflash.serving.outbox import Outbox, end_process
from trtllm_dflash.serving.outputs import OUTPUTS, Response
from trtllm_dflash.serving.parameters import TEXT_NAMES, EngineRequest, Fields, parse_request
from trtllm_dflash.serving.request_key import RequestKeys
from trtllm_dflash.serving.tensors import (
    FINAL,
    error_response,
    parameter,
    read_tensors,
    response,
    stops_as_complete,
    wants_codes,
)
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.threads import limit_threads
from trtllm_dflash.session.trees import tree_beside

#: Without a request, until a drained engine says so: what it answered passes through other models and Triton.
_SETTLED_SECONDS = 0.5


@dataclass(eq=False)
class Reply:
    """A request on its way through the engine; belongs to the outbox's thread.

    Attributes:
        key: with which another model of the repository may end it; 0: none does.
        outputs: names of the requested tensors, in the order of the model's configuration.
        request_id: the client's own name for it, with which it may stop it; "" is none.
        coded: its errors begin with their code.
        tokens: of the reply, so far.
        token_ids, texts, logprobs: the reply so far, where it is not streamed: what a client gets that stops it.
        cumulative: the sum of its tokens' log-probabilities so far.
        stopped: by its client, who gets a last response then, not an error.
        over: its last response has been sent.
    """

    asked: EngineRequest
    sender: Any
    outputs: list[str]
    key: int
    request_id: str
    coded: bool
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative: float = 0.0
    stopped: bool = False
    begun: bool = False
    over: bool = False
    ticket: Ticket | None = None
    cancelled: bool = False


class EngineModel:
    """The model: all requests run together in one service. Under tensor parallelism only rank 0 gets requests."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Loads the engine that the model's configuration names."""
        hold_lifeline()
        config = json.loads(arguments["model_config"])
        engine = Path(parameter(config, "engine"))
        self._decoupled = parameter(config, "decoupled") == "true"
        self._echo = parameter(config, "exclude_input_in_output") == "false"
        self._deadline = float(parameter(config, "deadline_seconds"))
        self._keys = RequestKeys()
        log_to_triton()
        stored = read_config(engine)
        limit_threads(stored)
        kernels = cast(Kernels, parameter(config, "kernels"))
        texts = {name: parameter(config, name) for name in ServiceSettings.model_fields}
        try:
            settings = ServiceSettings.model_validate(texts)
        except ValidationError as error:
            problem = error.errors()[0]
            given = "".join(f"{name} {texts.get(str(name), '')}: " for name in problem["loc"][:1])
            raise SettingsError(f"config.pbtxt of {config['name']}: {given}{problem['msg']}; deploy again") from None
        length = settings.draft_length if settings.draft else 0
        tree = tree_beside(parameter(config, "draft_tree"), length, stored.block_size)
        self._llm = self.open(engine, parameter(config, "device"), kernels, tree)
        if self._llm.session.communicator.rank != 0:
            threading.Thread(target=self._follow, name="dflash-rank", daemon=True).start()
            return
        # Updates that are not sent yet: put there by the service's thread, taken by the outbox's.
        self._unsent: deque[tuple[Reply, Update]] = deque()
        self._service = self._llm.service(settings, self._hand_over)
        self._metrics = Metrics(lambda: self._service.statistics().samples(), pb_utils)
        self._replies: set[Reply] = set()
        self._by_key: dict[int, Reply] = {}
        self._drain = DrainListener()
        self._draining = False
        self._busy = 0.0  # when a request was last on its way; infinite once it is reported that none will be
        self._outbox = Outbox(self._look_around)
        # What is loaded stays. Looking through all of it for garbage would make a step wait for 50 ms and more.
        gc.collect()
        gc.freeze()

    def open(self, engine: Path, device: str, kernels: Kernels, draft_tree: int | str) -> LLM:
        """Opens the engine; measurements open one that is in no directory."""
        return LLM.load(engine, device, kernels, prepare=False, draft_tree=draft_tree)

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
        gc.unfreeze()
        gc.collect()  # a response sender that is left to the interpreter's end crashes it

    # -- on Triton's thread ------------------------------------------------------------------------------------------

    def _take(self, request: Any, sender: Any) -> None:
        tensors = read_tensors(request)
        key = int(tensors["request_key"].item()) if "request_key" in tensors else 0
        if key and not self._keys.knows(key):
            raise RequestError("the other models of this repository make it; leave it out", "request_key")
        if "stop" in tensors and tensors["stop"].any():
            name = request.request_id()
            if not key and not name:
                raise RequestError("it names no request; give it the request id of the one to stop", "stop")
            complete = stops_as_complete(request)
            self._outbox.put(lambda: self._stop(key, sender) if key else self._stop_named(name, complete, sender))
            return
        fields = Fields(tensors, TEXT_NAMES if "prompt" in tensors else None)
        asked = parse_request(fields, self._decoupled, self._echo, choice_values(fields))
        requested = set(request.requested_output_names())
        outputs = [name for name in OUTPUTS if name in requested]
        self._begin_drain()
        reply = Reply(asked, sender, outputs, key, request.request_id(), wants_codes(request))
        self._outbox.put(lambda: self._begin(reply))

        def hand_on(update: Update) -> None:
            if update.error is not None:  # of a grammar that cannot be followed, say: a field is at fault, too
                update = replace(update, error=fields.refusal_of(update.error))
            self._unsent.append((reply, update))

        try:
            ticket = self._service.submit(
                asked.prompt_ids,
                asked.params,
                hand_on,
                draft=asked.draft,
                priority=asked.priority,
                deadline=self._deadline if asked.deadline is None else min(asked.deadline, self._deadline),
            )
            self._outbox.put(lambda: self._taken(reply, ticket))
        except DFlashError as error:
            refusal = Update(error=fields.refusal_of(error))
            self._outbox.put(lambda: self._send(reply, refusal))
        except Exception:  # a fault of ours: who asked is told, and nothing waits for a reply
            self._outbox.put(lambda: self._end(reply))
            raise

    def _refuse(self, sender: Any, error: Exception, coded: bool) -> None:
        if not isinstance(error, DFlashError):
            traceback.print_exception(error)
        self._outbox.put(lambda: sender.send(error_response(error, coded), flags=FINAL))

    def _begin_drain(self) -> None:
        """Drains the service once that is ordered; on two threads, so that no request overtakes the order."""
        seconds = None if self._draining else self._drain.seconds()
        if seconds is not None:
            self._service.drain(seconds)
            self._draining = True

    # -- on the service's thread -------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Wakes the outbox's thread once a step, not once a reply: each time it takes the interpreter from this one."""
        if self._unsent:
            self._outbox.put(self._send_updates)

    # -- on the outbox's thread --------------------------------------------------------------------------------------

    def _begin(self, reply: Reply) -> None:
        if reply.begun:
            return
        reply.begun = True
        self._replies.add(reply)
        if reply.key:
            self._by_key[reply.key] = reply
        # With a key, too: `preprocessing` gives one to whoever asks it.
        self._outbox.watch(reply.sender, lambda: self._cancel(reply))

    def _taken(self, reply: Reply, ticket: Ticket) -> None:
        if not reply.over:  # a short one may be: a ticket would hold it, and it its sender
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

    def _stop_named(self, name: str, complete: bool, sender: Any) -> None:
        for reply in self._replies:
            if reply.request_id == name:
                if complete and reply.ticket is not None:
                    self._service.finish(reply.ticket)
                    continue
                reply.stopped = True
                self._cancel(reply)
        sender.send(response({}, []), flags=FINAL)

    def _send_updates(self) -> None:
        """Sends one response a reply, of all the steps since the last: sending may take longer than a step."""
        joined: dict[Reply, Update] = {}
        while self._unsent:
            reply, update = self._unsent.popleft()
            before = joined.get(reply)
            if before is not None and update.error is not None:
                self._send(reply, before)  # its tokens, before the error that has none
                before = None
            joined[reply] = update if before is None else before.joined(update)
        for reply, update in joined.items():
            self._send(reply, update)

    def _send(self, reply: Reply, update: Update) -> None:
        """Sends a response. A reply of which that fails ends with the error; no other does."""
        if reply.over:
            return
        try:
            self._respond(reply, update)
        except Exception as error:
            traceback.print_exc()
            self._cancel(reply)
            self._end(reply)
            try:
                reply.sender.send(error_response(fault_of("response", error), reply.coded), flags=FINAL)
            except Exception:
                traceback.print_exc()  # whoever waits has the connection's own end

    def _respond(self, reply: Reply, update: Update) -> None:
        self._begin(reply)
        ended = update.completion is not None or update.error is not None
        reply.tokens += len(update.token_ids)
        if not reply.asked.streaming:
            reply.token_ids += update.token_ids
            reply.texts.append(update.text)
            reply.logprobs += update.logprobs
        reply.cumulative += sum(its.logprob for its in update.logprobs)
        if update.error is not None and not (reply.stopped and isinstance(update.error, CancelledError)):
            reply.sender.send(error_response(update.error, reply.coded), flags=FINAL)
        elif ended or reply.asked.streaming:
            outputs = self._response(reply, update).outputs(reply.outputs)
            reply.sender.send(response(outputs, reply.outputs), flags=FINAL if ended else 0)
        if ended:
            self._end(reply)

    def _end(self, reply: Reply) -> None:
        reply.over = True
        self._replies.discard(reply)
        reply.ticket = None  # which knows the reply: a circle
        if self._by_key.get(reply.key) is reply:
            del self._by_key[reply.key]
        self._outbox.unwatch(reply.sender)
        self._metrics.request_ended()

    def _look_around(self) -> bool:
        counting = self._metrics.advance()
        self._follow_drain()
        if self._service.failure is not None and not self._replies:
            # Triton has no way for a model to say that it is ill; that its process has ended is seen and acted upon.
            end_process(self._service.failure)
        return counting or self._draining

    def _follow_drain(self) -> None:
        """Reports, once a drain is ordered, when no request is on its way any more."""
        now = time.monotonic()
        if self._replies or not self._service.idle:
            self._busy = now
        self._begin_drain()
        if self._draining and now - self._busy >= _SETTLED_SECONDS:
            self._busy = math.inf
            self._drain.report_done()

    def _response(self, reply: Reply, update: Update) -> Response:
        """Makes a response: of the steps since the one before where the reply is streamed, else of the whole."""
        asked, done = reply.asked, update.completion
        ids, text, logprobs = update.token_ids, update.text, update.logprobs
        if not asked.streaming:
            ids, text = (reply.token_ids, "".join(reply.texts)) if done is None else (done.token_ids, done.text or "")
            if asked.echo:
                ids, text = asked.prompt_ids + ids, self._prompt_text(asked) + text
            logprobs = reply.logprobs
        return Response(
            asked,
            update,
            ids,
            text,
            reply.tokens,
            reply.key,
            stopped=update.error is not None,
            logprobs=logprobs,
            cumulative=reply.cumulative,
        )

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
