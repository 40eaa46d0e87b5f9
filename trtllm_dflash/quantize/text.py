"""Calibration text as tokens: samples to calibrate with, and others held back to measure with."""

import json
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.errors import RequestError, SettingsError
from trtllm_dflash.text.tokenizer import TextCodec


@dataclass(frozen=True)
class Sample:
    """The tokens of a prompt and of the text that follows it."""

    token_ids: list[int]
    prompt: int  # how many of them are the prompt


@dataclass(frozen=True)
class Samples:
    """A text's samples, in two parts that share none."""

    calibration: list[Sample]
    held_back: list[Sample]


def check_text(text: Path) -> None:
    """Checks, before what takes long, that a text can be read.

    Raises:
        SettingsError: it cannot.
    """
    _read(text)


def read_samples(text: Path, codec: TextCodec, samples: int, held_back: int, length: int) -> Samples:
    """Reads samples of a text, evenly from all of it.

    A file named `.jsonl` has an object a line: `prompt` goes through the chat template where there is one, `reference`
    is the reply; or there is `text`. Any other file is one long text, cut into pieces.

    Args:
        samples: to calibrate with, at most.
        held_back: to measure with.
        length: tokens of a sample, at most.

    Raises:
        SettingsError: it cannot be read, or holds too little.
    """
    rows = _rows(text, codec) if text.suffix == ".jsonl" else _pieces(text, codec, length)
    rows = [Sample(row.token_ids[:length], min(row.prompt, length - 1)) for row in rows if len(row.token_ids) > 1]
    wanted = samples + held_back
    if len(rows) <= held_back:
        raise SettingsError(f"--text {text}: holds {len(rows)} samples, and {held_back} are kept back to measure with")
    chosen = [rows[i * len(rows) // wanted] for i in range(wanted)] if len(rows) > wanted else rows
    every = len(chosen) // held_back if held_back else 0
    kept = {i * every for i in range(held_back)}
    calibration = [row for i, row in enumerate(chosen) if i not in kept]
    return Samples(calibration, [row for i, row in enumerate(chosen) if i in kept])


def _rows(text: Path, codec: TextCodec) -> list[Sample]:
    rows = []
    for number, line in enumerate(_read(text).split("\n"), start=1):  # not Unicode's other ends, which texts may have
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # no JSON, half a character, or nested without end
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("prompt", row.get("text")), str):
            raise SettingsError(f'--text {text}: line {number} is not a JSON object with "prompt" or "text"')
        prompt, reply = row.get("prompt"), row.get("reference")
        ids = codec.encode(row["text"]) if prompt is None else _chat(codec, prompt)
        following = codec.encode_words(reply) if isinstance(reply, str) else []
        rows.append(Sample(ids + following, len(ids) if following else max(1, len(ids) // 2)))
    return rows


def _chat(codec: TextCodec, prompt: str) -> list[int]:
    try:
        return codec.encode_chat([{"role": "user", "content": prompt}])
    except RequestError:  # no chat template, or not for this
        return codec.encode(prompt)


def _pieces(text: Path, codec: TextCodec, length: int) -> list[Sample]:
    ids = codec.encode(_read(text))
    pieces = [ids[first : first + length] for first in range(0, len(ids), length)]
    return [Sample(piece, max(1, len(piece) // 4)) for piece in pieces]


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingsError(f"--text {text}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"--text {text}: is not UTF-8: {error}") from None
