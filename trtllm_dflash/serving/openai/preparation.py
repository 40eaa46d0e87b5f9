"""Makes jobs of bodies: prompts become tokens, and fields sampling parameters. It runs on threads."""

import inspect
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import LongPromptError, RequestError
from trtllm_dflash.runtime.intake import Intake, Prompt
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.serving.client import TokenRequest
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.jobs import Choice, Job
from trtllm_dflash.serving.openai.messages import Function
from trtllm_dflash.serving.openai.replies import CompletionForm
from trtllm_dflash.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from trtllm_dflash.serving.openai.response_form import ResponseForm
from trtllm_dflash.serving.openai.responses import ResponsesRequest
from trtllm_dflash.serving.parameters import LONGEST_STOP, MOST_STOPS
from trtllm_dflash.text.reply.parts import Parser, PlainParser
from trtllm_dflash.text.tokenizer import TextCodec

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat's is what the context leaves

# Keys refused in chat_template_kwargs: the renderer's own arguments, another template among them.
_RENDERER_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)


class Preparation:
    """Makes jobs for one engine.

    Args:
        name: the model's, in the API.
        timeout: seconds for a whole reply.
    """

    def __init__(self, config: EngineConfig, codec: TextCodec, intake: Intake, name: str, timeout: float) -> None:
        self._config = config
        self._codec = codec
        self._intake = intake
        self._name = name
        self._timeout = timeout

    def check_name(self, name: str) -> None:
        """Refuses the name of another model."""
        if name != self._name:
            raise ApiError(404, f"the model {name!r} does not exist; {self._name!r} does", "model", "model_not_found")

    def completion(self, body: bytes, request_id: str) -> Job:
        """Makes a job of a body of /v1/completions."""
        asked = parse(CompletionRequest, body)
        self.check_name(asked.model)
        limit = asked.max_tokens or _COMPLETION_TOKENS
        choices: list[Choice] = []
        for prompt in asked.prompt:
            request = self._request(asked, self._tokens(prompt, "prompt"), limit, request_id)
            for each in _with_seeds(request, asked.n):
                choices.append(Choice(each, PlainParser(), index=len(choices), counts_prompt=each is request))
        form = CompletionForm(self._name, False, asked.include_usage)
        return Job(tuple(choices), form, asked.stream)

    def chat(self, body: bytes, request_id: str) -> Job:
        """Makes a job of a body of /v1/chat/completions."""
        asked = parse(ChatRequest, body)
        self.check_name(asked.model)
        functions = self.offered([tool.function for tool in asked.tools], asked.tool_choice)
        arguments = {**self._effort(asked.reasoning_effort, "reasoning_effort"), **asked.chat_template_kwargs}
        messages = [message.for_template() for message in asked.messages]
        ids = self._conversation(messages, "messages", arguments, functions)
        limit = asked.max_completion_tokens or asked.max_tokens or self._config.max_seq_len - len(ids)
        most_calls = 1 if asked.parallel_tool_calls is False else None
        requests = _with_seeds(self._request(asked, ids, limit, request_id), asked.n)
        choices = [
            self._chat_choice(each, self._codec.parser(ids, _schemas(functions)), most_calls, index)
            for index, each in enumerate(requests)
        ]
        return Job(tuple(choices), CompletionForm(self._name, True, asked.include_usage), asked.stream)

    def response(self, body: bytes, request_id: str) -> Job:
        """Makes a job of a body of /v1/responses."""
        asked = parse(ResponsesRequest, body)
        self.check_name(asked.model)
        functions = self.offered(asked.tools, asked.tool_choice)
        arguments = {**self._effort(asked.reasoning.effort, "reasoning.effort"), **asked.chat_template_kwargs}
        ids = self._conversation(asked.messages(), "input", arguments, functions)
        limit = asked.max_output_tokens or self._config.max_seq_len - len(ids)
        request = self._request(asked, ids, limit, request_id)
        most_calls = None if asked.parallel_tool_calls else 1
        choice = self._chat_choice(request, self._codec.parser(ids, _schemas(functions)), most_calls)
        return Job((choice,), ResponseForm(asked, self._name, request.params.temperature), asked.stream)

    def tokenized(self, body: bytes) -> dict[str, object]:
        """Answers a body of /tokenize."""
        asked = parse(TokenizeRequest, body)
        self.check_name(asked.model or self._name)
        if asked.prompt is not None and asked.add_special_tokens:
            tokens = self._tokens(asked.prompt, "prompt")
        elif asked.prompt is not None:
            try:
                words = self._codec.encode_words(asked.prompt, self._config.max_seq_len)
            except RequestError as error:
                raise _refusal(error, "prompt") from None
            tokens = self._tokens(words, "prompt")
        else:
            functions = self.offered([tool.function for tool in asked.tools], None)
            messages = [message.for_template() for message in asked.messages]
            tokens = self._conversation(messages, "messages", asked.chat_template_kwargs, functions)
        return {"count": len(tokens), "max_model_len": self._config.max_seq_len, "tokens": tokens}

    def detokenized(self, body: bytes) -> dict[str, object]:
        """Answers a body of /detokenize."""
        asked = parse(DetokenizeRequest, body)
        self.check_name(asked.model or self._name)
        tokens = self._tokens(asked.tokens, "tokens")
        return {"prompt": self._codec.backend.decode(tokens, skip_special_tokens=False)}

    def offered(self, functions: Sequence[Function], choice: object) -> list[Function]:
        """Returns the functions that a reply may call.

        Raises:
            ApiError: there are none to choose from, this engine's model knows none, or the choice cannot be kept to.
        """
        if choice not in (None, "none", "auto"):
            if not functions:
                raise ApiError(400, "tool_choice: there are no tools to choose from", "tool_choice")
            message = "tool_choice: only none and auto; a call cannot be forced without structured output"
            raise ApiError(400, message, "tool_choice", "unsupported_value")
        strict = next((function.name for function in functions if function.strict), None)
        if strict is not None:
            message = f"tools: strict of {strict!r} needs structured output, which is not there; leave it out"
            raise ApiError(400, message, "tools", "unsupported_value")
        if choice == "none":
            return []
        if functions and self._codec.chat_format is None:
            message = "tools: this engine's chat template asks for calls in no form that is known here"
            raise ApiError(400, message, "tools", "unsupported_value")
        return list(functions)

    def _effort(self, effort: str | None, param: str) -> dict[str, Any]:
        """Returns the variable of the chat template by which a model thinks as hard as that."""
        variables = self._codec.chat_variables
        if effort is None:
            return {}
        if "reasoning_effort" in variables:
            return {"reasoning_effort": effort}
        if "enable_thinking" in variables:
            return {"enable_thinking": effort != "none"}
        if effort == "none":
            return {}
        message = f"{param}: only none; this engine's chat template has no variable for it"
        raise ApiError(400, message, param, "unsupported_value")

    def _conversation(
        self,
        messages: list[dict[str, Any]],
        param: str,
        arguments: Mapping[str, Any],
        functions: Sequence[Function],
    ) -> list[int]:
        taken = sorted(_RENDERER_ARGUMENTS & arguments.keys())
        if taken:
            variable = f"chat_template_kwargs.{taken[0]}"
            raise ApiError(400, f"{variable}: not a variable of the chat template", variable)
        return self._tokens(messages, param, arguments, functions)

    def _tokens(
        self,
        prompt: Prompt,
        param: str,
        chat_arguments: Mapping[str, Any] | None = None,
        functions: Sequence[Function] = (),
    ) -> list[int]:
        try:
            return self._intake.encode(prompt, chat_arguments, [function.for_template() for function in functions])
        except RequestError as error:
            raise _refusal(error, param) from None

    def _chat_choice(self, request: TokenRequest, parser: Parser, most_calls: int | None, index: int = 0) -> Choice:
        """Makes a choice. Where its reply is parsed, stop strings are looked for here, in its content alone."""
        stop = request.params.stop
        if isinstance(parser, PlainParser):
            return Choice(request, parser, index=index, counts_prompt=index == 0)
        if len(stop) > MOST_STOPS or max(map(len, stop), default=0) > LONGEST_STOP:
            raise ApiError(400, f"stop: at most {MOST_STOPS}, of {LONGEST_STOP} characters each, are taken", "stop")
        request = replace(
            request,
            params=request.params.model_copy(update={"stop": ()}),
            wants_ids=self._codec.chat_format == "harmony",
        )
        return Choice(request, parser, stop, most_calls, index == 0, index)

    def _request(self, asked: GenerationRequest, ids: list[int], max_tokens: int, request_id: str) -> TokenRequest:
        temperature = asked.temperature
        if temperature is None:
            temperature = 1.0 if self._config.sampling else 0.0
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed if asked.seed is not None else secrets.randbelow(2**63),
            stop=tuple(asked.stop),
            ignore_eos=asked.ignore_eos,
        )
        return TokenRequest(ids, params, asked.draft, asked.priority, self._timeout, request_id, wants_ids=False)


def _schemas(functions: Sequence[Function]) -> dict[str, dict[str, Any]] | None:
    return {function.name: function.parameters or {} for function in functions} or None


def _refusal(error: RequestError, param: str) -> ApiError:
    code = "context_length_exceeded" if isinstance(error, LongPromptError) else None
    return ApiError(400, f"{param}: {error.reason}", param, code)


def _with_seeds(request: TokenRequest, count: int) -> list[TokenRequest]:
    """Makes several requests of one, with seeds that follow one another."""
    seeds = [(request.params.seed + more) % 2**64 for more in range(1, count)]
    return [request, *(replace(request, params=request.params.model_copy(update={"seed": seed})) for seed in seeds)]
