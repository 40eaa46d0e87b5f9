"""Triton's model `preprocessing`: encodes text to token ids, without the chat template."""

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.intake import Intake
from trtllm_dflash.serving.parameters import Fields, Tensors
from trtllm_dflash.serving.tensors import error_response, parameter, read_tensors, response, wants_codes
from trtllm_dflash.text.tokenizer import TextCodec

_NAMES = {"QUERY": "text_input (QUERY)"}  # as clients of the ensemble know it, and this model's own


class PreprocessingModel:
    """The model. It also gives each request a key, with which the models after it can end it."""

    def initialize(self, arguments: dict[str, str]) -> None:
        """Loads the engine's tokenizer."""
        engine = Path(parameter(json.loads(arguments["model_config"]), "engine"))
        config = read_config(engine)
        self._intake = Intake(config, TextCodec.load(engine, config.chat_arguments))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request with its token ids."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            fields = Fields(read_tensors(request), _NAMES)
            ids = self._encode(fields)
        except Exception as error:  # one request's fault is no other's
            return error_response(error, wants_codes(request))
        tensors: Tensors = {
            "INPUT_ID": np.array([ids], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)]], np.int32),
            "REQUEST_OUTPUT_LEN": np.array([[fields.scalar("REQUEST_OUTPUT_LEN", 0)]], np.int32),
            "REQUEST_KEY": np.array([[1 + secrets.randbelow(2**63 - 1)]], np.int64),
        }
        return response(tensors, request.requested_output_names())

    def _encode(self, fields: Fields) -> list[int]:
        try:
            return self._intake.encode("".join(fields.texts("QUERY")))
        except RequestError as error:
            raise fields.refusal("QUERY", error.reason) from None
