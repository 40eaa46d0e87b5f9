"""Prompts to train on, as JSON lines, and their split into those that are trained on and those that are held out.

A record is a prompt, a conversation up to the reply, or token ids of a prompt and its reply, such as a server harvests:

    {"prompt": "...", "domain": "code"}
    {"messages": [{"role": "user", "content": "..."}]}
    {"prompt_ids": [1, 2, 3], "reply_ids": [4, 5]}

Which part a prompt belongs to depends on its content alone: one more prompt in the file moves no other.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.train.settings import TrainSettings

_UNNAMED = ""  # the domain of records that name none


@dataclass(frozen=True)
class Record:
    """A prompt: messages, or token ids."""

    id: str
    line: int  # of its file
    domain: str
    messages: list[dict[str, str]] | None = None
    prompt_ids: Sequence[int] | None = None
    reply_ids: Sequence[int] | None = None  # the target's own, sampled as it is served
    thinking: bool | None = None  # None: as the chat template does by itself
    flag: str = "--data"  # that named its file


@dataclass(frozen=True)
class Split:
    """The records to train on, and those to measure on."""

    training: list[Record]
    held_out: list[Record]


def split(settings: TrainSettings) -> Split:
    """Reads the prompts and splits them.

    Raises:
        SettingsError: a file cannot be read, a line is no record, or one of the parts has none.
    """
    parts = _divided(settings, "--data", settings.data)
    if settings.general is not None:
        general = _divided(settings, "--general", settings.general)
        seen = {record.id for record in parts.training}
        beside = settings.general_share / (1 - settings.general_share)  # of general prompts to one's own
        others = [record for record in general.training if record.id not in seen]
        own = _first(parts.held_out, max(1, round(settings.evaluate_on * (1 - settings.general_share))))
        held = {record.id for record in parts.held_out}
        others_held = [record for record in general.held_out if record.id not in held]
        parts = Split(
            parts.training + others[: round(len(parts.training) * beside)],
            own + _first(others_held, round(len(own) * beside)),
        )
    for part, name in ((parts.held_out, "held out"), (parts.training, "left to train on")):
        if not part:
            raise SettingsError(f"--held-out {settings.held_out:g}: none of the prompts is {name}; give more of them")
    return Split(parts.training, _first(parts.held_out, settings.evaluate_on))


def _first(records: list[Record], count: int) -> list[Record]:
    """Takes the first by their ids: the same ones, whatever others are there."""
    return sorted(records, key=lambda record: record.id)[:count]


def as_lines(records: list[Record]) -> str:
    """Writes records as JSON lines."""
    return "".join(json.dumps(vars(record), ensure_ascii=False, default=list) + "\n" for record in records)


def read_lines(file: Path) -> list[Record]:
    """Reads what `as_lines` wrote."""
    with file.open(encoding="utf-8", newline="\n") as lines:
        rows = map(json.loads, lines)
        return [
            Record(**{**row, "prompt_ids": _ids(row["prompt_ids"]), "reply_ids": _ids(row["reply_ids"])})
            for row in rows
        ]


def _divided(settings: TrainSettings, flag: str, file: Path) -> Split:
    records = {record.id: record for record in _records(settings, flag, file)}.values()
    if not records:
        raise SettingsError(f"{flag} {file}: holds no prompt")
    held_out = [record for record in records if int(record.id, 16) / 16 ** len(record.id) < settings.held_out]
    out = {record.id for record in held_out}
    return Split([record for record in records if record.id not in out], held_out)


def _records(settings: TrainSettings, flag: str, file: Path) -> Iterator[Record]:
    try:
        # Lines end with \n alone: U+2028 and the like stand as they are inside JSON.
        with file.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                record = _record(line, number, settings) if line.strip() else None
                if record is not None:
                    yield replace(record, flag=flag)
                elif line.strip():
                    raise SettingsError(
                        f'{flag} {file}: line {number} is not a JSON object with a "prompt", "messages", or '
                        '"prompt_ids" and "reply_ids"'
                    )
    except OSError as error:
        raise SettingsError(f"{flag} {file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{flag} {file}: is not UTF-8 ({error})") from None


def _record(line: str, number: int, settings: TrainSettings) -> Record | None:
    """Reads a record; None where it is none."""
    try:
        return _record_of(json.loads(line), number, settings)
    except (ValueError, RecursionError):  # no JSON, half a character, or nested without end
        return None


def _record_of(row: object, number: int, settings: TrainSettings) -> Record | None:
    if not isinstance(row, dict):
        return None
    named = row.get(settings.domain_key)
    domain = named if isinstance(named, str) else _UNNAMED
    domain.encode()
    if "prompt_ids" in row:
        ids, reply = row["prompt_ids"], row.get("reply_ids")
        known = _are_ids(ids) and _are_ids(reply)
        return Record(_digest(ids), number, domain, prompt_ids=_ids(ids), reply_ids=_ids(reply)) if known else None
    messages = _messages(row)
    if messages is None:
        return None
    id = _digest([[message["role"], " ".join(message["content"].lower().split())] for message in messages])
    thinking = None if settings.thinking is None else int(id[-8:], 16) / 16**8 < settings.thinking
    return Record(id, number, domain, messages, thinking=thinking)


def _messages(row: dict[str, Any]) -> list[dict[str, str]] | None:
    """Reads a conversation up to the reply; None where there is none."""
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    found = [{key: message.get(key) for key in ("role", "content")} for message in messages]
    if found and found[-1]["role"] == "assistant":
        found.pop()  # the reply: the target's own takes its place
    return found if found and all(isinstance(text, str) for message in found for text in message.values()) else None


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _ids(values: list[int] | None) -> Sequence[int] | None:
    """Packs token ids: there may be many, and a list takes several times as much."""
    return None if values is None else array("i", values)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()[:32]
