"""Replies of the target to the prompts, by our own engine: what a drafter is trained to foresee.

They are token ids, prompt and reply apart, so that no chat template is ever parsed for where a reply begins. Replies to
held-out prompts are greedy, those to train on as the target's own generation configuration says.
"""

import json
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.checkpoint.validation import first_problem
from trtllm_dflash.errors import LongPromptError, RequestError, SettingsError
from trtllm_dflash.llm import LLM
from trtllm_dflash.runtime.request import SamplingParams, Sequence
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.train.documents import Document
from trtllm_dflash.train.prompts import Record

#: A reply with fewer tokens has none to draft.
_LEAST = 2


@dataclass
class Rate:
    """Measured replies: their number, their tokens, and the seconds that they took."""

    replies: int = 0
    tokens: int = 0
    seconds: float = 0.0


def sampling_of(folder: Path, temperature: float | None, max_tokens: int) -> SamplingParams:
    """Reads the target's own way to sample from generation_config.json; `temperature` takes the place of its own."""
    file = folder / "generation_config.json"
    stated = read_json(file) if file.is_file() else {}
    own = stated.get("temperature", 1.0) if stated.get("do_sample") else 0.0
    values = {"max_tokens": max_tokens, "temperature": own if temperature is None else temperature}
    if values["temperature"]:
        values |= {"top_k": stated.get("top_k") or 0, "top_p": stated.get("top_p") or 1.0}
    try:
        return SamplingParams.model_validate(values)
    except ValidationError as error:
        raise SettingsError(f"{file}: {first_problem(error)}") from None


@dataclass(frozen=True)
class Reply:
    """A record's prompt and reply; without one where its prompt is too long."""

    record: Record
    prompt_ids: list[int]
    token_ids: list[int]

    def as_line(self) -> str:
        """Writes it as a JSON line."""
        names = {"id": self.record.id, "domain": self.record.domain}
        return json.dumps({**names, "prompt_ids": self.prompt_ids, "reply_ids": self.token_ids}) + "\n"


def regenerate(
    llm: LLM,
    records: list[Record],
    file: Path,
    params: SamplingParams,
    keep: bool,
    progress: Callable[[int, int], None],
    on_rate: Callable[[Rate, int], None],
) -> int:
    """Writes a reply to each record, a line each; goes on behind those that are there.

    Args:
        keep: takes over the replies of records that have one.
        on_rate: told what the first replies took, and how many are left, if any.

    Returns:
        The number of prompts that were left out, for being too long.
    """
    there = {row["id"] for row in _read_whole_lines(file)}
    left = [record for record in records if record.id not in there]
    kept = [record for record in left if keep and record.reply_ids]
    asked = [record for record in left if not (keep and record.reply_ids)]
    file.parent.mkdir(exist_ok=True)
    began, rate, skipped = time.perf_counter(), Rate(), 0
    with file.open("a", encoding="utf-8") as lines:
        for reply in (_kept(llm, record) for record in kept):
            if reply.token_ids:
                lines.write(reply.as_line())
            else:
                skipped += 1
        for done, reply in enumerate(_replies(llm, asked, params), start=1):
            if reply.token_ids:
                lines.write(reply.as_line())
                lines.flush()  # a process that is killed has lost what was under way alone
                rate = Rate(rate.replies + 1, rate.tokens + len(reply.token_ids), time.perf_counter() - began)
                if rate.replies == llm.config.max_batch and done < len(asked):
                    on_rate(rate, len(asked) - done)
            else:
                skipped += 1
            progress(len(records) - len(asked) + done, len(records))
    return skipped


def _replies(llm: LLM, records: list[Record], params: SamplingParams) -> Iterator[Reply]:
    """Generates replies, as many at a time as the engine has slots; yields each when it is complete."""
    scheduler = Scheduler(llm.session)
    waiting = iter(records)
    running: dict[Sequence, Record] = {}
    while True:
        while len(running) < 2 * llm.config.max_batch and (record := next(waiting, None)) is not None:
            sequence = _sequence(llm, record, params)
            if sequence is None:
                yield Reply(record, [], [])
            else:
                running[sequence] = record
                scheduler.submit(sequence)
        if not running:
            return
        for sequence in scheduler.step():
            if sequence.done:
                yield Reply(running.pop(sequence), sequence.prompt_ids, sequence.completion().token_ids)


def read_documents(file: Path) -> list[Document]:
    """Reads replies as documents; those with nothing to draft are left out.

    In the order of their ids: that in the file is the order in which replies were complete, which a pause changes.
    """
    documents = {
        row["id"]: Document(array("i", row["prompt_ids"] + row["reply_ids"]), len(row["prompt_ids"]), row["domain"])
        for row in _read_whole_lines(file)
        if len(row["reply_ids"]) >= _LEAST
    }
    return [documents[id] for id in sorted(documents)]


def _sequence(llm: LLM, record: Record, params: SamplingParams) -> Sequence | None:
    """Makes a record ready for a scheduler; None where its prompt is too long."""
    try:
        if record.prompt_ids is not None:
            ids = llm.intake.encode(list(record.prompt_ids))
        else:
            assert record.messages is not None
            arguments = None if record.thinking is None else {"enable_thinking": record.thinking}
            ids = llm.intake.encode(record.messages, arguments)
        seed = int(record.id[:8], 16)
        return llm.intake.sequence(ids, params.model_copy(update={"seed": seed}))
    except LongPromptError:
        return None
    except RequestError as error:
        raise SettingsError(f"{record.flag}: line {record.line}: {error}") from None


def _kept(llm: LLM, record: Record) -> Reply:
    """Takes over a record's own reply, as far as the engine's length goes."""
    assert record.prompt_ids is not None and record.reply_ids is not None
    length, vocabulary = llm.config.max_seq_len, llm.config.target.vocab_size
    if max(*record.prompt_ids, *record.reply_ids) >= vocabulary:
        raise SettingsError(f"{record.flag}: line {record.line}: token ids are 0 to {vocabulary - 1}")
    prompt = list(record.prompt_ids[:length])
    return Reply(record, prompt, list(record.reply_ids[: length - len(prompt)]))


def _read_whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Reads the rows of a file of replies, and cuts off a line that was never finished."""
    if not file.is_file():
        return
    with file.open("r+b") as lines:
        whole = 0
        for line in lines:
            if not line.endswith(b"\n"):
                lines.truncate(whole)
                return
            whole += len(line)
            yield json.loads(line)
