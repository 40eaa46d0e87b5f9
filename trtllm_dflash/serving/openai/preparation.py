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
from trtllm_dflash.runtime.structured import Structured
from trtllm_dflash.serving.client import TokenRequest
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.jobs import Choice, Job
from trtllm_dflash.serving.openai.messages import Function, one_instruction
from trtllm_dflash.serving.openai.offer import Chosen, Offer
from trtllm_dflash.serving.openai.replies import CompletionForm
from trtllm_dflash.serving.openai.requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from trtllm_dflash.serving.openai.response_form import ResponseForm
from trtllm_dflash.serving.openai.response_tools import functions_of
from trtllm_dflash.serving.openai.responses import ResponsesRequest
from trtllm_dflash.serving.parameters import LONGEST_STOP, MOST_STOPS
from trtllm_dflash.session.limits import MOST_BAD_RUNS
from trtllm_dflash.text.form_size import check_size, source_of
from trtllm_dflash.text.harmony import EFFORTS
from trtllm_dflash.text.reply.call_grammar import call_grammar
from trtllm_dflash.text.reply.grammar_terms import Callee, form_of
from trtllm_dflash.text.reply.harmony_form import harmony_form
from trtllm_dflash.text.reply.llama3_form import check_apart
from trtllm_dflash.text.reply.parts import Parser, PlainParser
from trtllm_dflash.text.token_text import TokenTexts
from trtllm_dflash.text.tokenizer import TextCodec

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat's is what the context leaves

# Keys refused in chat_template_kwargs: the renderer's own arguments, another template among them, and its conversation.
_RENDERER_ARGUMENTS = {"messages", *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters}


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
        self._texts = TokenTexts(codec.backend, codec.hidden_ids)
        self._end_ids = frozenset(config.stop_token_ids)

    def check_name(self, name: str) -> None:
        """Refuses the name of another model."""
        if name != self._name:
            raise ApiError(404, f"the model {name!r} does not exist; {self._name!r} does", "model", "model_not_found")

    def completion(self, body: bytes, request_id: str) -> Job:
        """Makes a job of a body of /v1/completions."""
        asked = parse(CompletionRequest, body)
        self.check_name(asked.model)
        limit = _COMPLETION_TOKENS if asked.max_tokens is None else max(1, asked.max_tokens)  # the engine makes one
        more = _choice_values(asked, asked.logprobs)
        best = None if asked.replies == asked.n else (asked.replies, asked.n)
        implied = {"logprobs": "best_of"} if best is not None and asked.logprobs is None else {}
        if implied:
            more["logprobs"] = 0
        if asked.echo and asked.prompt_logprobs is None:
            more["prompt_logprobs"] = asked.logprobs
        _check_form(asked.structured, asked.form_field)
        choices: list[Choice] = []
        for prompt in asked.prompt:
            ids = self._tokens(prompt, "prompt")
            echo = None if not asked.echo else prompt if isinstance(prompt, str) else self._codec.decode(ids)
            request = self._request(asked, ids, limit, request_id, more)
            for each in _with_seeds(request, asked.replies):
                choice = Choice(
                    each,
                    PlainParser(),
                    counts_prompt=each is request,
                    index=len(choices),
                    end_ids=self._end_ids,
                    echo=echo,
                    only_prompt=asked.max_tokens == 0,
                )
                choices.append(choice)
        form = self._form(asked, False, asked.logprobs is not None)
        return Job(
            tuple(choices), form, asked.stream, best, asked.form_field, count_field=asked.count_field, implied=implied
        )

    def chat(self, body: bytes, request_id: str) -> Job:
        """Makes a job of a body of /v1/chat/completions."""
        asked = parse(ChatRequest, body)
        self.check_name(asked.model)
        offer = self._offer([tool.function for tool in asked.tools], asked.tool_choice, asked.parallel_tool_calls)
        arguments = {**self._effort(asked.reasoning_effort, "reasoning_effort"), **asked.chat_template_kwargs}
        messages = [message.for_template() for message in asked.messages]
        ids = self._conversation(messages, "messages", arguments, offer.functions)
        self._check_effort(asked.reasoning_effort, "reasoning_effort", ids)
        self._check_structured(asked, ids)
        limit = asked.max_completion_tokens or asked.max_tokens or self._config.max_seq_len - len(ids)
        more = _choice_values(asked, asked.top_logprobs if asked.logprobs else None)
        more["structured"] = self._structured(asked, offer, ids)
        requests = _with_seeds(self._request(asked, ids, limit, request_id, more), asked.n)
        choices = [
            self._chat_choice(each, self._parser(asked, ids, offer), offer, index)
            for index, each in enumerate(requests)
        ]
        form, form_field = self._form(asked, True, asked.logprobs), "tools" if offer.held else asked.form_field
        return Job(tuple(choices), form, asked.stream, None, form_field, offer.names)

    def response(self, body: bytes, request_id: str) -> Job:
        """Makes a job of a body of /v1/responses."""
        asked = parse(ResponsesRequest, body)
        self.check_name(asked.model)
        offer = self._offer(functions_of(asked.tools), asked.tool_choice, asked.parallel_tool_calls)
        arguments = {**self._effort(asked.reasoning.effort, "reasoning.effort"), **asked.chat_template_kwargs}
        ids = self._conversation(asked.messages(), "input", arguments, offer.functions)
        self._check_effort(asked.reasoning.effort, "reasoning.effort", ids)
        self._check_structured(asked, ids)
        limit = asked.max_output_tokens or self._config.max_seq_len - len(ids)
        request = self._request(asked, ids, limit, request_id, {"structured": self._structured(asked, offer, ids)})
        choice = self._chat_choice(request, self._parser(asked, ids, offer), offer)
        form = ResponseForm(asked, self._name, request.params.temperature)
        return Job((choice,), form, asked.stream, None, "tools" if offer.held else asked.form_field, offer.names)

    def tokenized(self, body: bytes) -> dict[str, object]:
        """Answers a body of /tokenize, whatever the length of its prompt: it is not to be served."""
        asked = parse(TokenizeRequest, body)
        self.check_name(asked.model or self._name)
        if asked.prompt == "":
            tokens = []
        elif asked.prompt is not None:
            encode = self._codec.encode if asked.add_special_tokens else self._codec.encode_words
            try:
                tokens = encode(asked.prompt)
            except RequestError as error:
                raise _refusal(error, "prompt") from None
        else:
            functions = self._offer([tool.function for tool in asked.tools], None).functions
            messages = [message.for_template() for message in asked.messages]
            tokens = self._conversation(messages, "messages", asked.chat_template_kwargs, functions, serve=False)
        names = self._names(tokens) if asked.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": self._config.max_seq_len,
            "tokens": tokens,
            "token_strs": names,
        }

    def _names(self, tokens: list[int]) -> list[str]:
        """Lists tokens as the vocabulary writes them."""
        names = {token: self._codec.backend.id_to_token(token) or "" for token in set(tokens)}
        return [names[token] for token in tokens]

    def detokenized(self, body: bytes) -> dict[str, object]:
        """Answers a body of /detokenize."""
        asked = parse(DetokenizeRequest, body)
        self.check_name(asked.model or self._name)
        tokens = self._tokens(asked.tokens, "tokens") if asked.tokens else []
        return {"prompt": self._codec.backend.decode(tokens, skip_special_tokens=False)}

    def _offer(self, functions: Sequence[Function], choice: Chosen, parallel: bool | None = None) -> Offer:
        """Decides which functions a reply may call; see `Offer.of`.

        Raises:
            ApiError: there are none to choose from, or this engine's model knows none.
        """
        offer = Offer.of(functions, choice, parallel)
        if offer.functions and self._codec.chat_format is None:
            message = "tools: this engine's chat template asks for calls in no form that is known here"
            raise ApiError(400, message, "tools", "unsupported_value")
        return offer

    def _form(self, asked: CommonRequest, chat: bool, logprobs: bool) -> CompletionForm:
        prompts = asked.prompt_logprobs is not None
        texts = self._texts if logprobs or prompts else None
        return CompletionForm(self._name, chat, asked.include_usage, texts, prompts, asked.tells_usage)

    def _structured(self, asked: ChatRequest | ResponsesRequest, offer: Offer, ids: list[int]) -> Structured | None:
        """Makes the form of a reply, once for all of its choices."""
        form = self._form_of(asked, offer, ids)
        _check_form(form, "tools" if offer.held else asked.form_field)
        return form

    def _form_of(self, asked: ChatRequest | ResponsesRequest, offer: Offer, ids: list[int]) -> Structured | None:
        """Makes the form of a reply: of its calls, of what it says where it calls nothing, or of both."""
        own = asked.structured
        if own is None or not offer.functions or offer.must:
            return self._form_of_calls(offer, ids) or self._form_of_reply(asked)
        try:
            form = form_of(own.kind, own.value)
            if self._codec.chat_format == "llama3":
                check_apart(own.kind, form, offer.names)
            return self._form_of_calls(replace(offer, must=True, held=True), ids, form)
        except RequestError as error:
            raise _refusal(error, asked.form_field) from None

    def _form_of_calls(self, offer: Offer, ids: list[int], otherwise: str | None = None) -> Structured | None:
        """Makes the form of a reply whose calls are held to one; `otherwise`: of one that is no calls."""
        chat_format = self._codec.chat_format
        if not offer.held or chat_format is None:
            return None
        callees = [Callee(each.name, each.schema_of_arguments, each.strict is True) for each in offer.callees]
        thinking = self._codec.thinks_first(ids)
        try:
            source = call_grammar(
                chat_format, callees, offer.must, offer.parallel, thinking, self._codec.marker_ids, otherwise
            )
        except RequestError as error:
            raise ApiError(400, str(error), error.field, "unsupported_value") from None
        return Structured(kind="grammar", value=source)

    def _form_of_reply(self, asked: ChatRequest | ResponsesRequest) -> Structured | None:
        """Makes the form of a whole reply, of which its reader sees a part: the one that is held to what was asked."""
        if asked.structured is None or self._codec.chat_format != "harmony":
            return asked.structured
        param = asked.form_field
        try:
            return Structured(kind="grammar", value=harmony_form(asked.structured.kind, asked.structured.value))
        except RequestError as error:
            raise ApiError(400, f"{param}: {error.reason}", param, "unsupported_value") from None

    def _check_structured(self, asked: ChatRequest | ResponsesRequest, ids: list[int]) -> None:
        """Refuses a form for a reply of which only a part would be held to it."""
        if asked.structured is None:
            return
        param = asked.form_field
        if self._codec.chat_format != "harmony" and self._codec.begins_with_thinking(ids):
            message = f"{param}: the reply would begin with thinking, which a form leaves no room for; turn it off"
            raise ApiError(400, message, param, "unsupported_value")

    def _effort(self, effort: str | None, param: str) -> dict[str, Any]:
        """Returns the variable of the chat template by which a model thinks as hard as that."""
        variables = self._codec.chat_variables
        if effort is None:
            return {}
        if self._codec.chat_format == "harmony" and effort not in EFFORTS:
            message = f"{param}: {effort} is none of {', '.join(EFFORTS)}, which this engine's model knows"
            raise ApiError(400, message, param, "unsupported_value")
        if "reasoning_effort" in variables:
            return {"reasoning_effort": effort}
        for variable in ("enable_thinking", "thinking"):
            if variable in variables:
                return {variable: effort != "none"}
        if effort == "none":
            return {}
        message = f"{param}: only none; this engine's chat template has no variable for it"
        raise ApiError(400, message, param, "unsupported_value")

    def _check_effort(self, effort: str | None, param: str, ids: list[int]) -> None:
        """Refuses to think not at all where the prompt begins the thinking, and has no variable that says otherwise."""
        if effort == "none" and not self._effort(effort, param) and self._codec.begins_with_thinking(ids):
            message = f"{param}: this engine's model always thinks; its chat template has no variable for it"
            raise ApiError(400, message, param, "unsupported_value")

    def _conversation(
        self,
        messages: list[dict[str, Any]],
        param: str,
        arguments: Mapping[str, Any],
        functions: Sequence[Function],
        serve: bool = True,
    ) -> list[int]:
        taken = sorted(_RENDERER_ARGUMENTS & arguments.keys())
        if taken:
            variable = f"chat_template_kwargs.{taken[0]}"
            raise ApiError(400, f"{variable}: not a variable of the chat template", variable)
        calling = next((n for n, message in enumerate(messages) if message.get("tool_calls")), None)
        if calling is not None and not self._codec.writes_calls:
            field = param if param == "input" else f"{param}.{calling}.tool_calls"
            raise ApiError(400, f"{field}: this engine's chat template writes no calls", field, "unsupported_value")
        if self._codec.chat_format != "harmony":  # which has a message for each
            messages = one_instruction(messages)
        return self._tokens(messages, param, arguments, functions, serve)

    def _tokens(
        self,
        prompt: Prompt,
        param: str,
        chat_arguments: Mapping[str, Any] | None = None,
        functions: Sequence[Function] = (),
        serve: bool = True,
    ) -> list[int]:
        encode = self._intake.encode if serve else self._intake.encode_unserved
        try:
            return encode(prompt, chat_arguments, [function.for_template() for function in functions])
        except LongPromptError as error:  # by these words clients know it, too
            length = f"this model's maximum context length is {self._config.max_seq_len} tokens"
            raise ApiError(400, f"{param}: {error.reason}; {length}", param, "context_length_exceeded") from None
        except RequestError as error:
            raise _refusal(error, param) from None

    def _parser(self, asked: ChatRequest | ResponsesRequest, ids: list[int], offer: Offer) -> Parser:
        beside_form = () if asked.structured is None or offer.must else offer.names
        held = offer.held or asked.structured is not None
        return self._codec.parser(ids, offer.schemas, beside_form, held, offer.must)

    def _chat_choice(self, request: TokenRequest, parser: Parser, offer: Offer, index: int = 0) -> Choice:
        """Makes a choice. Where its reply is parsed, stop strings are looked for here, in its content alone."""
        stop = request.params.stop
        if isinstance(parser, PlainParser):
            return Choice(request, parser, index=index, counts_prompt=index == 0, end_ids=self._end_ids)
        text = self._codec.text() if stop or (offer.functions and not offer.parallel) else None
        request = replace(
            request,
            params=request.params.model_copy(update={"stop": ()}),
            wants_ids=request.wants_ids or text is not None or self._codec.chat_format == "harmony",
        )
        return Choice(
            request,
            parser,
            stop,
            offer.most_calls,
            index == 0,
            index,
            self._end_ids,
            only_calls=offer.must,
            text=text,
        )

    def _request(
        self,
        asked: GenerationRequest,
        ids: list[int],
        max_tokens: int,
        request_id: str,
        more: Mapping[str, Any] | None = None,
    ) -> TokenRequest:
        _check_texts("stop", asked.stop, MOST_STOPS)
        if isinstance(asked, CommonRequest):
            _check_texts("bad_words", asked.bad_words, MOST_BAD_RUNS)  # each is one at least
        temperature = asked.temperature
        if temperature is None:
            temperature = 1.0 if self._config.sampling else 0.0
        if asked.top_p == 0:
            temperature = 0.0
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=asked.top_k,
            top_p=asked.top_p or 1.0,
            seed=asked.seed if asked.seed is not None else secrets.randbelow(2**63),
            stop=tuple(asked.stop),
            ignore_eos=asked.ignore_eos,
            **(more or {}),
        )
        wants_ids = params.logprobs is not None
        return TokenRequest(ids, params, asked.draft, asked.priority, self._timeout, request_id, wants_ids)


def _choice_values(asked: CommonRequest, logprobs: int | None) -> dict[str, Any]:
    """Returns what says how tokens are chosen, besides temperature and filters, and what is told of that."""
    return {
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "logit_bias": asked.logit_bias,
        "min_p": asked.min_p,
        "min_tokens": asked.min_tokens,
        "bad_words": tuple(asked.bad_words),
        "logprobs": logprobs,
        "prompt_logprobs": asked.prompt_logprobs,
        "structured": asked.structured,
    }


def _check_texts(field: str, texts: Sequence[str], most: int) -> None:
    """Refuses more texts, or longer ones, than a reply is searched for: each choice would carry them."""
    if len(texts) > most or max(map(len, texts), default=0) > LONGEST_STOP:
        raise ApiError(400, f"{field}: at most {most}, of {LONGEST_STOP} characters each, are taken", field)


def _check_form(form: Structured | None, param: str) -> None:
    """Refuses a form that no engine takes: each choice would carry it there."""
    if form is None:
        return
    try:
        check_size(form.kind, source_of(form.kind, form.value))
    except RequestError as error:
        raise _refusal(error, param) from None


def _refusal(error: RequestError, param: str) -> ApiError:
    return ApiError(400, f"{param}: {error.reason}", param)


def _with_seeds(request: TokenRequest, count: int) -> list[TokenRequest]:
    """Makes several requests of one, with seeds that follow one another."""
    seeds = [(request.params.seed + more) % 2**64 for more in range(1, count)]
    return [request, *(replace(request, params=request.params.model_copy(update={"seed": seed})) for seed in seeds)]
