"""Checks requests and makes them ready: a prompt and its sampling parameters become a `Sequence`."""

import threading
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import LongPromptError, RequestError, SettingsError
from trtllm_dflash.runtime.request import DEFAULT_PRIORITY, SamplingParams, Sequence
from trtllm_dflash.session.limits import MOST_BAD_RUNS, MOST_BAD_TOKENS
from trtllm_dflash.text.stream import TextStream
from trtllm_dflash.text.tokenizer import TextCodec

if TYPE_CHECKING:
    from trtllm_dflash.text.grammar import Grammar, Grammars

#: A prompt: raw text, a conversation for the chat template, or token ids.
Prompt = str | list[dict[str, Any]] | list[int]


#: Parameters that not every session follows.
_SHAPES = (
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_p",
    "min_tokens",
    "bad_words",
    "bad_token_sequences",
    "structured",
)
_DEFAULTS = SamplingParams().model_dump()


class Intake:
    """Checks requests against an engine's limits, and refuses others by the name of the field that is at fault.

    Args:
        config: the engine's.
        codec: its tokenizer, if any.
        max_prompt_tokens: longest prompt; by default the engine's length less one token.
        lacks: why its session computes no log-probabilities, penalties and the like; "" where it does.

    Raises:
        SettingsError: the engine takes no prompt as long as `max_prompt_tokens`.
    """

    def __init__(
        self, config: EngineConfig, codec: TextCodec | None, max_prompt_tokens: int | None = None, lacks: str = ""
    ) -> None:
        self._config = config
        self._codec = codec
        self._lacks = lacks
        self._grammars: Grammars | None = None  # made with the first
        self._turn = threading.Lock()
        self._longest, self._knob = config.max_seq_len - 1, "build --max-seq-len"
        if max_prompt_tokens is not None:
            if max_prompt_tokens > self._longest:
                raise SettingsError(
                    f"max_prompt_tokens {max_prompt_tokens}: this engine takes {self._longest} ({self._knob})"
                )
            self._longest, self._knob = max_prompt_tokens, "max_prompt_tokens"

    def encode(
        self,
        prompt: Prompt,
        chat_arguments: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Encodes a prompt, and checks that the engine can serve it.

        Args:
            chat_arguments: given to a conversation's template besides the engine's own, and before them.
            tools: functions that a conversation's reply may call, in OpenAI's form.

        Raises:
            RequestError: it is empty, no text, or no token ids of this engine; or its chat template refuses it.
            LongPromptError: it has too many tokens.
        """
        ids = self._ids(prompt, chat_arguments, tools, self._longest)
        if not ids:
            raise RequestError("the prompt is empty", "prompt")
        if len(ids) > self._longest:
            raise self._too_long(str(len(ids)))
        self._check_tokens("prompt", ids)
        return ids

    def encode_unserved(
        self,
        prompt: Prompt,
        chat_arguments: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Encodes a prompt of any length, whose tokens alone are asked for; arguments as in `encode`.

        gpt-oss's conversations must fit the engine all the same: its library takes time with the square of a word's
        length.

        Raises:
            RequestError: it is no text, or its chat template refuses it; a LongPromptError where it must fit.
        """
        fits = self._codec is not None and self._codec.chat_format == "harmony" and _is_chat(prompt)
        return self._ids(prompt, chat_arguments, tools, self._longest if fits else None)

    def sequence(
        self,
        prompt: Prompt,
        params: SamplingParams,
        draft: bool = True,
        priority: int = DEFAULT_PRIORITY,
        deadline: float | None = None,
    ) -> Sequence:
        """Makes a request ready for a `Scheduler`; `deadline` is on the clock of `time.monotonic`.

        Raises:
            RequestError: this engine cannot serve it.
        """
        ids = self.encode(prompt)
        self._check_params(params)
        end = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._config.stop_token_ids))
        if params.structured is not None:
            end.update(self._grammar_ends())
        return Sequence(
            prompt_ids=ids,
            params=params,
            room=min(params.max_tokens, self._config.max_seq_len - len(ids)),
            end_token_ids=frozenset(end),
            text=self._reply(prompt, params.stop),
            draft=draft,
            priority=priority,
            deadline=deadline,
            bad_runs=self._bad_runs(params),
            grammar=self._grammar(prompt, params),
        )

    def _ids(
        self,
        prompt: Prompt,
        chat_arguments: Mapping[str, Any] | None,
        tools: list[dict[str, Any]] | None,
        most: int | None,
    ) -> list[int]:
        if isinstance(prompt, list) and all(map(_is_token, prompt)):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        if self._codec is None:
            raise RequestError("this engine has no tokenizer (tokenizer.json); give token ids")
        try:
            if isinstance(prompt, str):
                return self._codec.encode(prompt, most)
            if not isinstance(prompt, list) or not all(_is_message(message) for message in prompt):
                raise RequestError('a prompt is a text, token ids, or messages with a text "role" and "content"')
            return self._codec.encode_chat(prompt, chat_arguments, most, tools or ())  # type: ignore[arg-type]
        except LongPromptError:  # it was not worth counting them all
            raise self._too_long(f"more than {most}") from None

    def _too_long(self, tokens: str) -> LongPromptError:
        return LongPromptError(f"the prompt has {tokens} tokens; the limit is {self._longest} ({self._knob})", "prompt")

    def _check_params(self, params: SamplingParams) -> None:
        """Checks the parameters that depend on the engine, which `SamplingParams` cannot check by itself."""
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        for field in ("stop_token_sequences", "bad_token_sequences"):
            for run in getattr(params, field):
                self._check_tokens(field, run)
        for run in params.bad_token_sequences:
            if len(run) > MOST_BAD_TOKENS:
                raise RequestError(f"{run} are more than {MOST_BAD_TOKENS} tokens", "bad_token_sequences")
        self._check_tokens("logit_bias", params.logit_bias)
        if params.bad_words and self._codec is None:
            raise RequestError("needs a tokenizer, and this engine has none; use bad_token_sequences", "bad_words")
        if params.stop and self._codec is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids", "stop")
        if params.temperature > 0 and not self._config.sampling:
            reason = "this engine was built greedy and cannot sample; build it with --sampling"
            raise RequestError(reason, "temperature")
        if params.min_tokens > params.max_tokens:
            raise RequestError(f"{params.min_tokens} is more than max_tokens {params.max_tokens}", "min_tokens")
        for name in _SHAPES:
            if self._lacks and getattr(params, name) != _DEFAULTS[name]:
                raise RequestError(f"{self._lacks}; leave it out", name)

    def _grammar(self, prompt: Prompt, params: SamplingParams) -> "Grammar | None":
        """Compiles the grammar that a reply is held to, if any."""
        asked = params.structured
        if asked is None:
            return None
        if self._codec is None:
            raise RequestError("needs a tokenizer, and this engine has none", "structured")
        if params.ignore_eos:
            raise RequestError("ends with the model's end token; leave out ignore_eos", "structured")
        from trtllm_dflash.text.grammar import Grammars  # what few requests need
        from trtllm_dflash.text.reply.harmony_form import harmony_form

        with self._turn:  # the first request makes it, whichever thread that is on
            if self._grammars is None:
                ends = self._grammar_ends()
                if not ends:
                    raise RequestError("needs an end token, and this engine knows none", "structured")
                self._grammars = Grammars(self._codec.backend, self._config.target.vocab_size, ends)
        grammar = self._grammars.compile(asked.kind, asked.value)
        if self._codec.chat_format != "harmony" or not _is_chat(prompt):
            return grammar
        # Where the form is wrong by itself, that has been said with the place in it.
        return self._grammars.compile("grammar", harmony_form(asked.kind, asked.value))

    def _grammar_ends(self) -> list[int]:
        """Lists the tokens that end a reply where its grammar does: the engine's, or else its tokenizer's."""
        end = None if self._codec is None else self._codec.end_id
        known = [end] if end is not None and end < self._config.target.vocab_size else []
        return list(self._config.stop_token_ids) or known

    def _bad_runs(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Lists the runs of tokens that a reply is kept from: a text's are those at a beginning, and behind a space.

        No reply has a text that no tokens stand for, or tokens that the model does not know.
        """
        vocabulary = self._config.target.vocab_size
        runs = list(params.bad_token_sequences)
        for word in params.bad_words:
            assert self._codec is not None
            bare = word.strip() or word
            for run in (self._codec.encode_words(bare), self._codec.encode_words(" " + bare)):
                if len(run) > MOST_BAD_TOKENS:
                    reason = f"{word!r} has {len(run)} tokens; at most {MOST_BAD_TOKENS} are taken"
                    raise RequestError(reason, "bad_words")
                if run and max(run) < vocabulary and tuple(run) not in runs:
                    runs.append(tuple(run))
        if len(runs) > MOST_BAD_RUNS:
            field = "bad_words" if params.bad_words else "bad_token_sequences"
            raise RequestError(f"they are {len(runs)} runs of tokens; at most {MOST_BAD_RUNS} are taken", field)
        return tuple(runs)

    def _check_tokens(self, field: str, ids: Iterable[int]) -> None:
        vocabulary = self._config.target.vocab_size
        for token in ids:
            if not 0 <= token < vocabulary:
                raise RequestError(f"{token} is not a token id; they are 0 to {vocabulary - 1}", field)

    def _reply(self, prompt: Prompt, stop: tuple[str, ...]) -> TextStream | None:
        if self._codec is None:
            return None
        return self._codec.reply(stop) if _is_chat(prompt) else self._codec.text(stop)


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and any(isinstance(part, dict) for part in prompt)


def _is_token(token: object) -> bool:
    """Whether that is a whole number, NumPy's too; to Python, true and false are."""
    return type(token) is int or (isinstance(token, Integral) and not isinstance(token, bool))


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
