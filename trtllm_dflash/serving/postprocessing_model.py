"""Triton's model `postprocessing`: decodes token ids, and notices that an ensemble's client has gone."""

import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import RequestError
from trtllm_dflash.serving import inner
from trtllm_dflash.serving.lifeline import hold_lifeline
from trtllm_dflash.serving.outbox import LEAST_PAUSE, POLL_SECONDS
from trtllm_dflash.serving.parameters import Fields
from trtllm_dflash.serving.tensors import error_response, parameter, read_tensors, response, string_tensor

_REMEMBERED = 4096  # requests that are running


class PostprocessingModel:
    """The model. Triton (2.51) tells not the engine that an ensemble's client has gone, but the steps after it."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Loads nothing: within the ensemble the text is made already, and a tokenizer takes 200 MB."""
        hold_lifeline()
        config = json.loads(arguments["model_config"])
        self._engine = Path(parameter(config, "engine"))
        self._decoupled = parameter(config, "decoupled") == "true"
        self._codec: Any = None
        self._vocabulary = 0
        self._polled: OrderedDict[int, float] = OrderedDict()  # key -> when
        self._last_polled = 0.0

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request, and ends those whose client has gone."""
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        """Frees other models' responses."""
        inner.finish()

    def _answer(self, request: Any) -> Any:
        try:
            tensors = read_tensors(request)
            fields = Fields(tensors)
            if "REQUEST_KEY" in tensors:
                self._stop_if_cancelled(request, fields.scalar("REQUEST_KEY"))
            if "OUTPUT_TEXT" in tensors:
                output = tensors["OUTPUT_TEXT"]  # [1, 1]
            else:
                output = string_tensor(self._decode(fields, tensors["TOKENS_BATCH"][0], tensors["SEQUENCE_LENGTH"][0]))
            return response({"OUTPUT": output.reshape(-1)}, ["OUTPUT"])  # [N], as TensorRT-LLM's clients read it
        except inner.InnerError as error:
            return error.response
        except Exception as error:  # one request's fault is no other's
            return error_response(error)

    def _decode(self, fields: Fields, tokens: NDArray[Any], lengths: NDArray[Any]) -> list[str]:
        """Decodes tokens [beams, N] of lengths [beams]."""
        if len(lengths) != len(tokens) or any(not 0 <= length <= tokens.shape[1] for length in lengths):
            raise fields.refusal("SEQUENCE_LENGTH", f"{lengths.tolist()} do not fit TOKENS_BATCH {list(tokens.shape)}")
        if self._codec is None:
            from trtllm_dflash.text.tokenizer import TextCodec

            self._codec = TextCodec.load(self._engine, {})
            self._vocabulary = read_config(self._engine).target.vocab_size
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            given = tokens.min() if tokens.min() < 0 else tokens.max()
            raise fields.refusal("TOKENS_BATCH", f"{given} is not a token id; they are 0 to {self._vocabulary - 1}")
        if self._codec is None:
            raise RequestError("OUTPUT: this engine has no tokenizer")
        return [self._codec.decode(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]

    def _stop_if_cancelled(self, request: Any, key: int) -> None:
        if not self._decoupled:
            return
        now = time.monotonic()
        if now - self._last_polled < LEAST_PAUSE or now - self._polled.get(key, 0.0) < POLL_SECONDS:
            return
        self._last_polled = self._polled[key] = now
        self._polled.move_to_end(key)
        if len(self._polled) > _REMEMBERED:
            self._polled.popitem(last=False)
        if request.is_cancelled():
            inner.stop(key, decoupled=True)
