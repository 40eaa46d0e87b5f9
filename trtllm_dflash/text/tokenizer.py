"""The engine's tokenizer and chat format, through Hugging Face transformers; files only, never remote code."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from trtllm_dflash.errors import CheckpointError, EngineError, LongPromptError, RequestError, first_line, one_line
from trtllm_dflash.text.chat_template import check_syntax
from trtllm_dflash.text.harmony import ARGUMENTS, Harmony
from trtllm_dflash.text.reply.formats import (
    ChatFormat,
    format_of_template,
    markers_of,
    messages_for,
    read_template,
    reply_parser,
)
from trtllm_dflash.text.reply.gemma4 import CHANNEL_END
from trtllm_dflash.text.reply.parts import Parser
from trtllm_dflash.text.reply.thinking import OPENING
from trtllm_dflash.text.reply.typescript import declared
from trtllm_dflash.text.stream import TextStream, special_tokens
from trtllm_dflash.text.tiktoken_file import RANKS_FILE, convert, needs_conversion, read_ranks

if TYPE_CHECKING:  # a second of a process that has no texts
    from transformers import PreTrainedTokenizerFast

#: What a tokenizer consists of in a Hugging Face folder; copied into the engine directory.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

#: What to do where there is no tokenizer.
MAKE_TOKENIZER = (
    "make one in the target's folder with transformers, AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), and "
    "build again"
)

_LONG_WORD = 8  # characters of a token, in the mean: texts whose tokens would have to be longer are counted first
_PIECE = 1 << 16  # characters that are counted at a time
_SEAM = 256  # tokens that a cut between two pieces may add
_OPENING_TOKENS = 8  # that the opening of a reply's thinking, and the newline behind it, have at most
_VARIABLES = ("enable_thinking", "reasoning_effort")  # of chat templates, that clients set by fields of their own
_THINKING = re.compile(
    r"{%[-+]? *(el)?if [^%]*(?<![\w.'\"])thinking(?![\w'\"(])"
)  # Kimi-K2.5's variable, a common word
_COMPOSED = 4  # bytes that a normalizer may make one of: composing, at most 9 become 3


class TextCodec:
    """Encodes text and conversations to token ids, and decodes them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", chat_arguments: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        # Whole texts as they are, from any thread: transformers' own `encode` sets these each time, and may not twice
        # at once.
        self.backend.no_truncation()
        self.backend.no_padding()
        self._chat_arguments = chat_arguments
        self._harmony = Harmony.of(self.backend)
        self._template = str(tokenizer.chat_template or "")
        self._token_bytes = _most_bytes_of_a_token(self.backend)
        special = special_tokens(self.backend)
        shown = {token for token, content in special.items() if content in markers_of(self.chat_format)}
        #: Special tokens that mark the parts of a reply, by their text: what is written in them is text here.
        self.marker_ids = {special[token]: token for token in shown}
        #: Special tokens that are no text.
        self.hidden_ids = frozenset(special) - shown

    @classmethod
    def load(cls, folder: Path, chat_arguments: dict[str, Any]) -> "TextCodec | None":
        """Loads the tokenizer in a folder; None where it has none.

        Raises:
            EngineError: its files cannot be read.
        """
        if needs_conversion(folder):
            with TemporaryDirectory() as converted:
                convert(folder, Path(converted))
                return cls.load(Path(converted), chat_arguments)
        if not has_tokenizer(folder):
            return None
        try:
            tokenizer = _load(folder)
        except Exception as error:  # the library raises whatever its parsers raise
            raise EngineError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
        try:
            return cls(tokenizer, chat_arguments)
        except EngineError as error:
            raise EngineError(f"{folder}: {error}") from None

    @property
    def backend(self) -> Tokenizer:
        """The `tokenizers` object behind it."""
        backend: Tokenizer = self._tokenizer.backend_tokenizer
        return backend

    @property
    def chat_format(self) -> ChatFormat | None:
        """The way in which the model writes calls of tools; None where it has none, or none that is known."""
        if self._harmony is not None:
            return "harmony"
        return format_of_template(self._template)

    @property
    def writes_calls(self) -> bool:
        """Whether a conversation's calls of tools are in what the chat template makes of it."""
        return self.chat_format is not None or "tool_calls" in self._template

    @property
    def chat_variables(self) -> frozenset[str]:
        """Names of variables that the chat template takes besides messages and tools."""
        if self._harmony is not None:
            return frozenset(ARGUMENTS)
        named = frozenset(name for name in _VARIABLES if name in self._template)
        return named | {"thinking"} if _THINKING.search(self._template) else named

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Encodes a raw text, with the special tokens that the tokenizer adds itself.

        Args:
            most: of tokens. A text that has far more is refused for less than the work of encoding it.

        Raises:
            LongPromptError: it surely has more.
            RequestError: it is no valid Unicode.
        """
        return self._encode(text, special=True, most=most)

    def encode_words(self, text: str, most: int | None = None) -> list[int]:
        """Encodes a text without the special tokens that the tokenizer adds to a prompt; `most` as in `encode`."""
        return self._encode(text, special=False, most=most)

    @property
    def end_id(self) -> int | None:
        """The token that ends a text."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    @property
    def pad_id(self) -> int | None:
        """The token that fills up a batch; the end's where the tokenizer has none of its own."""
        token: int | None = self._tokenizer.pad_token_id
        return self.end_id if token is None else token

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        arguments: Mapping[str, Any] | None = None,
        most: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Encodes a conversation through the chat template. Arguments as in `chat_text`, errors as in `encode` too."""
        if most is not None and len(messages) > most:  # each has a token at least
            raise LongPromptError(f"there are more than {most} messages")
        if self._harmony is not None:
            try:
                if most is not None:
                    # Each token is of some text in it; the names of fields, which are not, are few.
                    text = "".join(_texts([*messages, *tools]))
                    self._check_length(text, len(text), most)
                return self._harmony.encode(messages, {**self._chat_arguments, **(arguments or {})}, tools)
            except RecursionError:  # arguments of a call come as a text, however deep
                raise RequestError("arguments of a call are nested too deeply", "messages") from None
        return self._encode(self.chat_text(messages, arguments, tools), special=False, most=most)

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Renders a conversation with the chat template, up to where the assistant's reply begins.

        gpt-oss's are made by OpenAI's library instead; see `Harmony`.

        Args:
            arguments: given to the template besides the engine's own, and before them.
            tools: functions that may be called, in OpenAI's form.

        Raises:
            RequestError: there is no chat template, or it refuses these messages.
        """
        if self._harmony is not None:
            ids = self.encode_chat(messages, arguments, tools=tools)
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        if not self._tokenizer.chat_template:
            raise RequestError("this engine has no chat template; give the prompt raw (--raw)")
        given = {**self._chat_arguments, **(arguments or {})}
        if tools and "tools_ts_str" in self._template:
            given = {"tools_ts_str": declared(tools), **given}
        try:
            asked = messages_for(self.chat_format, self._template, messages)
            text: str = self._tokenizer.apply_chat_template(
                asked, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **given
            )
        except Exception as error:  # a template raises whatever it likes, of messages of any form
            raise RequestError(f"the chat template refuses these messages: {one_line(error)}") from error
        return text

    def reply(self, stop: tuple[str, ...] = ()) -> TextStream:
        """Starts the text of a reply, which grows as tokens arrive, without any thinking that the chat format marks."""
        return self.text(stop) if self._harmony is None else self._harmony.reply(stop)

    def text(self, stop: tuple[str, ...] = ()) -> TextStream:
        """Starts a text that grows as tokens arrive, without special tokens but for those that mark a reply's parts."""
        return TextStream(self.backend, stop, self.hidden_ids)

    def parser(
        self,
        prompt_ids: Sequence[int],
        schemas: Mapping[str, Mapping[str, Any]] | None,
        beside_form: Sequence[str] = (),
        held: bool = False,
        must: bool = False,
    ) -> Parser:
        """Starts taking a reply apart.

        Args:
            prompt_ids: which may have ended inside the reply's thinking.
            schemas: of the parameters of each function that may be called, by its name; None: no calls are looked for.
            beside_form, held, must: see `reply_parser`.
        """
        if self._harmony is not None:
            return self._harmony.parser(schemas)
        return reply_parser(self.chat_format, schemas, self.begins_with_thinking(prompt_ids), beside_form, held, must)

    def begins_with_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the reply to that prompt begins inside its thinking."""
        if self._harmony is not None:
            return True
        return self._ending(prompt_ids).endswith(OPENING)

    def thinks_first(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the reply to that prompt begins inside its thinking, or may begin with it."""
        if self.chat_format == "gemma4":  # whose prompt ends with an empty channel where it is not to think
            return not self._ending(prompt_ids).endswith(CHANNEL_END)
        return self.begins_with_thinking(prompt_ids)

    def _ending(self, prompt_ids: Sequence[int]) -> str:
        return self.decode(list(prompt_ids[-_OPENING_TOKENS:])).rstrip()

    def _encode(self, text: str, special: bool, most: int | None = None) -> list[int]:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError("the prompt is not valid UTF-8: it holds half of a surrogate pair") from None
        if most is not None:
            self._check_length(text, size, most)
        # A batch of one: `encode` would keep every other Python thread waiting meanwhile.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    def _check_length(self, text: str, size: int, most: int) -> None:
        """Refuses a text that surely has too many tokens: by its bytes, or having counted as many in its beginning."""
        if self._token_bytes is not None and size > most * self._token_bytes:
            raise LongPromptError(f"{size} bytes are more than {most} tokens hold")
        count = 0
        if len(text) > most * _LONG_WORD:
            for start in range(0, len(text), _PIECE):
                count += len(self._encode(text[start : start + _PIECE], special=False)) - _SEAM
                if count > most:
                    raise LongPromptError(f"it has more than {most} tokens")

    def decode(self, ids: list[int]) -> str:
        """Decodes token ids, without special tokens but for those that mark a reply's parts."""
        return str(self._tokenizer.decode([token for token in ids if token not in self.hidden_ids]))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder, of a checkpoint or an engine, has a tokenizer that we read."""
    return (folder / "tokenizer.json").is_file() or needs_conversion(folder)


def check_tokenizer(folder: Path, vocabulary: int) -> None:
    """Checks that a checkpoint's files of texts can be read, where it has them.

    Of the tokenizer's vocabulary, tokens that were added may be beyond the target's: then nobody can use them.

    Raises:
        CheckpointError: one is damaged, or the tokenizer another model's.
    """
    for name in TOKENIZER_FILES:
        if os.path.lexists(folder / name) and not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is no file, nor a link to one; download it again")
    template = read_template(folder)
    if template is not None:
        check_syntax(template, folder / "chat_template.jinja")
    if not has_tokenizer(folder):
        return
    if needs_conversion(folder):
        file = folder / RANKS_FILE
        size = len(read_ranks(file))
    else:
        file = folder / "tokenizer.json"
        try:
            size = Tokenizer.from_file(str(file)).get_vocab_size(with_added_tokens=False)
        except Exception as error:  # the library raises no narrower one
            raise CheckpointError(f"{file} is truncated or damaged ({one_line(error)}); download it again") from None
    if size > vocabulary:
        raise CheckpointError(
            f"{file} has {size} tokens, but config.json a vocabulary of {vocabulary}: it is another model's; "
            "copy the target's own here"
        )


def _load(folder: Path) -> "PreTrainedTokenizerFast":
    """Loads a folder's tokenizer as transformers' AutoTokenizer does.

    That one imports torch, seconds of a process that computes nothing: so it is not asked where it has no choice.
    """
    from transformers import PreTrainedTokenizerFast

    if not _is_plain(folder):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def _is_plain(folder: Path) -> bool:
    """Whether tokenizer.json says all of a tokenizer, by its class in the folder of an engine, which names no model."""
    said = {name: _read_object(folder / name) for name in ("config.json", "tokenizer_config.json")}
    if "model_type" in said["config.json"] or "auto_map" in said["tokenizer_config.json"]:
        return False
    return said["tokenizer_config.json"].get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")


def _read_object(file: Path) -> dict[str, Any]:
    """Reads an object of a JSON file; an empty one where there is none, which is transformers' to say."""
    with suppress(OSError, ValueError):
        read = json.loads(file.read_text(encoding="utf-8"))
        return read if isinstance(read, dict) else {}
    return {}


def _most_bytes_of_a_token(tokenizer: Tokenizer) -> int | None:
    """Finds how many bytes of a text one token stands for at most; None where one may stand for any number.

    That is a token for unknown words. What tokenizers of bytes write as one character counts as two here: a bound.
    """
    model = tokenizer.model
    if getattr(model, "unk_token", None) is not None and not getattr(model, "byte_fallback", False):
        return None
    longest = max((len(token.encode(errors="replace")) for token in tokenizer.get_vocab()), default=1)
    return longest * (1 if tokenizer.normalizer is None else _COMPOSED)


def _texts(value: object) -> Iterator[str]:
    """Lists the texts in a JSON value, without the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, Iterable):
        for each in value:
            yield from _texts(each)
