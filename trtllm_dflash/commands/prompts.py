"""Prompts of `--prompt` and of a file."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trtllm_dflash.errors import RequestError, SettingsError, why_unreadable


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """Read the prompts: one, or a file of JSON lines or text lines.

    Args:
        prompt: the prompt itself; "-" reads standard input.

    Raises:
        SettingsError: both are given or neither, or one cannot be read.
    """
    if (prompt is None) == (file is None):
        raise SettingsError("give one of --prompt TEXT and --prompts FILE")
    if file is None:
        assert prompt is not None
        text = _read_standard_input() if prompt == "-" else prompt
        check_text(_flag(prompt), text)
        return [text]
    try:
        # Not splitlines: it also splits at U+2028 and the like, which stand as they are inside JSON.
        lines = [line.rstrip("\r") for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompts {file}: {why_unreadable(error)}") from None
    prompts = [_read_prompt_line(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise SettingsError(f"--prompts {file}: holds no prompt")
    return prompts


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise SettingsError("--prompt -: standard input is closed")
    try:
        text = sys.stdin.read().removeprefix("\ufeff")  # the mark that some programs begin with, as in files
    except UnicodeDecodeError as error:
        raise SettingsError(f"--prompt -: {why_unreadable(error)}") from None
    if not text.strip():  # of a pipe whose other end has failed, say
        raise SettingsError("--prompt -: standard input holds no prompt")
    return text


def check_text(flag: str, text: str) -> None:
    """Check that a text of the command line or of standard input is UTF-8; Python keeps other bytes in surrogates.

    Raises:
        SettingsError: it is not.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(f"{flag}: is not UTF-8") from None


def check_prompts(
    encode: Callable[[Any], object], prompts: Sequence[object], prompt: str | None, file: Path | None
) -> None:
    """Check that an engine takes all prompts, before it replies to any.

    Args:
        encode: the engine's, of a prompt.
        prompt, file: where they are from, as in `read_prompts`.

    Raises:
        SettingsError: it does not take one; names the flag, and which of a file's it is.
    """
    for number, each in enumerate(prompts, start=1):
        try:
            encode(each)
        except RequestError as error:
            place = _flag(prompt) if file is None else f"--prompts {file}: prompt {number} of {len(prompts)}"
            raise SettingsError(f"{place}: {error.reason}") from None


def _flag(prompt: str | None) -> str:
    return "--prompt -" if prompt == "-" else "--prompt"


def _read_prompt_line(file: Path, number: int, line: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        text = json.loads(line)["prompt"]
    except (ValueError, KeyError, RecursionError):  # the last of what is nested without end
        text = None
    if not isinstance(text, str):
        raise SettingsError(f'--prompts {file}: line {number} is not a JSON object with a text "prompt"')
    return text
