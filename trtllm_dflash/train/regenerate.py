"""Replies of the target to the prompts, by our own engine: what a drafter is trained to foresee.

They are token ids, prompt and reply apart, so that no chat template is ever parsed for where a reply begins. Replies to
held-out prompts are greedy, those to train on as the target's own generation configuration says.
"""

import json
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.checkpoint.folder import read_json
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
    chosen = own if temperature is None else temperature
    filters = {} if chosen == 0 else {"top_k": stated.get("top_k") or 0, "top_p": stated.get("top_p") or 1.0}
    return SamplingParams(max_tokens=max_tokens, temperature=chosen, **filters)


def regenerate(
    llm: LLM,
    records: list[Record],
    file: Path,
    params: SamplingParams,
    progress: Callable[[int, int], None],
    on_rate: Callable[[Rate, int], None],
) -> int:
    """Writes a reply to each record, a line each; goes on behind those that are there.

    Args:
        on_rate: told once what the first replies took, and how many are left.

    Returns:
        The number of prompts that were left out, for being too long.
    """
    there = _read_whole_lines(file)
    left = [record for record in records if record.id not in there]
    done, skipped, rate, told = len(records) - len(left), 0, Rate(), False
    waiting = iter(left)
    scheduler = Scheduler(llm.session)
    running: dict[Sequence, Record] = {}
    began = time.perf_counter()
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        while True:
            while len(running) < 2 * llm.config.max_batch and (record := next(waiting, None)) is not None:
                sequence = None if record.reply_ids and params.temperature > 0 else _sequence(llm, record, params)
                if sequence is None and record.reply_ids is None:
                    skipped += 1
                elif sequence is None:
                    _write(lines, record, record.prompt_ids or [], record.reply_ids or [])
                else:
                    running[sequence] = record
                    scheduler.submit(sequence)
            if not running:
                break
            for sequence in scheduler.step():
                if not sequence.done:
                    continue
                record = running.pop(sequence)
                reply = sequence.completion().token_ids
                _write(lines, record, sequence.prompt_ids, reply)
                rate = Rate(rate.replies + 1, rate.tokens + len(reply), time.perf_counter() - began)
                if not told and rate.replies >= min(llm.config.max_batch, len(left)):
                    on_rate(rate, len(left) - rate.replies - skipped)
                    told = True
                progress(done + rate.replies + skipped, len(records))
    return skipped


def read_documents(file: Path) -> list[Document]:
    """Reads replies as documents; those with nothing to draft are left out."""
    rows = _read_whole_lines(file).values()
    return [
        Document(array("i", row["prompt_ids"] + row["reply_ids"]), len(row["prompt_ids"]), row["domain"])
        for row in rows
        if len(row["reply_ids"]) >= _LEAST
    ]


def _sequence(llm: LLM, record: Record, params: SamplingParams) -> Sequence | None:
    """Makes a record ready for a scheduler; None where its prompt is too long."""
    try:
        if record.prompt_ids is not None:
            ids = llm.intake.encode(record.prompt_ids)
        else:
            assert record.messages is not None
            arguments = None if record.thinking is None else {"enable_thinking": record.thinking}
            ids = llm.intake.encode(record.messages, arguments)
        seed = int(record.id[:8], 16)
        return llm.intake.sequence(ids, params.model_copy(update={"seed": seed}))
    except LongPromptError:
        return None
    except RequestError as error:
        raise SettingsError(f"--data: line {record.line}: {error}") from None


def _write(lines, record: Record, prompt: list[int], reply: list[int]) -> None:  # type: ignore[no-untyped-def]
    row = {"id": record.id, "domain": record.domain, "prompt_ids": prompt, "reply_ids": reply}
    lines.write(json.dumps(row) + "\n")
    lines.flush()  # a process that is killed has lost what was under way alone


def _read_whole_lines(file: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    """Reads a file of replies by their records' ids, and cuts off a line that was never finished."""
    if not file.is_file():
        return {}
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as opened:
            opened.truncate(whole)
    rows = (json.loads(line) for line in content[:whole].splitlines())
    return {row["id"]: row for row in rows}
