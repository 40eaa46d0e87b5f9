"""Triton's model `preprocessing`: encodes text to token ids, without the chat template."""

import json
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.intake import Intake
from trtllm_dflash.serving.lifeline import hold_lifeline
from trtllm_dflash.serving.parameters import Fields, Tensors, check_stops
from trtllm_dflash.serving.request_key import RequestKeys
from trtllm_dflash.serving.tensors import error_response, parameter, read_tensors, response, wants_codes
from trtllm_dflash.text.tokenizer import TextCodec

#: In the order of the model's configuration.
_OUTPUTS = (
    "INPUT_ID",
    "REQUEST_INPUT_LEN",
    "DECODER_INPUT_ID",
    "REQUEST_DECODER_INPUT_LEN",
    "BAD_WORDS_IDS",
    "STOP_WORDS_IDS",
    "REQUEST_OUTPUT_LEN",
    "OUT_END_ID",
    "OUT_PAD_ID",
    "REQUEST_KEY",
)
#: As clients of the ensemble know them, and this model's own names.
_NAMES = {
    "QUERY": "text_input (QUERY)",
    "REQUEST_OUTPUT_LEN": "max_tokens (REQUEST_OUTPUT_LEN)",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
}


class PreprocessingModel:
    """The model. It also gives each request a key, with which the models after it can end it."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Loads the engine's tokenizer."""
        hold_lifeline()
        engine = Path(parameter(json.loads(arguments["model_config"]), "engine"))
        config = read_config(engine)
        self._keys = RequestKeys()
        self._codec = TextCodec.load(engine, config.chat_arguments)
        self._intake = Intake(config, self._codec)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request with its token ids."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            fields = Fields(read_tensors(request), _NAMES)
            for field in ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS"):
                if fields.row(field):  # clients send them empty
                    raise fields.refusal(field, "not supported; leave it out")
            ids = self._encode(fields)
            requested = set(request.requested_output_names())
            tensors: Tensors = {
                "INPUT_ID": np.array([ids], np.int32),
                "REQUEST_INPUT_LEN": np.array([[len(ids)]], np.int32),
                "REQUEST_OUTPUT_LEN": np.array([[fields.scalar("REQUEST_OUTPUT_LEN", 0)]], np.int32),
                "REQUEST_KEY": np.array([[self._keys.make()]], np.int64),
            }
            if not requested <= tensors.keys():  # the ensemble asks for no more
                tensors |= self._other_inputs(fields)
        except Exception as error:  # one request's fault is no other's
            return error_response(error, wants_codes(request))
        return response(tensors, (name for name in _OUTPUTS if name in requested))

    def _other_inputs(self, fields: Fields) -> Tensors:
        """Makes the inputs of `tensorrt_llm` that the ensemble leaves out, or gives it as text."""
        codec = self._codec
        assert codec is not None, "the prompt was encoded"
        end, pad = (
            fields.scalar(name, -1 if token is None else token)
            for name, token in (("END_ID", codec.end_id), ("PAD_ID", codec.pad_id))
        )
        return {
            "DECODER_INPUT_ID": np.array([[pad]], np.int32),  # as TensorRT-LLM has it where nothing is to be decoded
            "REQUEST_DECODER_INPUT_LEN": np.array([[1]], np.int32),
            "BAD_WORDS_IDS": self._runs(fields, "BAD_WORDS_DICT"),
            "STOP_WORDS_IDS": self._runs(fields, "STOP_WORDS_DICT"),
            "OUT_END_ID": np.array([[end]], np.int32),
            "OUT_PAD_ID": np.array([[pad]], np.int32),
        }

    def _runs(self, fields: Fields, field: str) -> NDArray[np.int32]:
        """Encodes words to runs of tokens [1, 2, N]: all their tokens, and each run's end; see `Fields.token_runs`."""
        words = fields.texts(field)
        check_stops(fields, field, words, "characters")
        assert self._codec is not None
        runs = [self._codec.encode_words(word) for word in words]
        tokens, ends = list(chain(*runs)), list(accumulate(map(len, runs)))
        width = max(1, len(tokens))
        return np.array([[tokens + [0] * (width - len(tokens)), ends + [-1] * (width - len(ends))]], np.int32)

    def _encode(self, fields: Fields) -> list[int]:
        fields.require("QUERY")
        try:
            return self._intake.encode("".join(fields.texts("QUERY")))
        except RequestError as error:
            raise fields.refusal("QUERY", error.reason) from None
