"""Times of a step on this machine, by slots, drafts and prompt tokens: measured once, and kept with the engine."""

import json
import platform
import statistics
import time
from pathlib import Path

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.ladder import batch_sizes, draft_lengths, prompt_sizes
from trtllm_dflash.runtime.draft_length import StepTimes
from trtllm_dflash.runtime.prefill_budget import MixedStepTimes
from trtllm_dflash.session.calls import Piece, Prepare, Step
from trtllm_dflash.session.session import Session
from trtllm_dflash.step import Drafting

FILE = "step_times.json"

_POSITION = 256  # tokens that the measured slots hold
_ROUNDS = 2
_STEPS = 2  # in a round


def step_times(session: Session, folder: Path | None) -> MixedStepTimes:
    """Finds the engine's step times on this machine: kept in its directory, or else measured now and kept there.

    Measuring writes over the caches' rows.
    """
    machine = _machine(session)
    kept = _read(folder / FILE, machine) if folder is not None else None
    if kept is not None:
        return kept
    times = {(slots, drafts, 0): seconds for (slots, drafts), seconds in measure(session).items()}
    if session.limits.mixes and session.device.type == "cuda":
        times |= measure_mixed(session)
    if folder is not None:
        _write(folder / FILE, machine, times)
    return times


def decoding_times(times: MixedStepTimes) -> StepTimes:
    """Takes the times of steps that decode alone."""
    return {(slots, drafts): seconds for (slots, drafts, tokens), seconds in times.items() if not tokens}


def measure_mixed(session: Session) -> MixedStepTimes:
    """Times steps that read prompts beside few and many slots, with few and many drafts; seconds, medians."""
    config = session.config
    lengths = _prepared_lengths(session)
    times = {}
    few = {lengths[0], *lengths[3:4], *lengths[5:6], lengths[-1]}
    for slots in {*batch_sizes(config.max_batch)[-3:-2], config.max_batch}:
        decoding = range(slots - 1)  # the last slot reads
        for slot in decoding:
            session.run(_first(slot, min(_POSITION, config.max_seq_len - 1), config)).read()
        for drafts in few:
            drafting = _drafting(drafts, config)
            for tokens in prompt_sizes(config.chunk):
                ids = [0] * min(tokens, session.limits.prompt_rows, config.max_seq_len - 1)
                rows = [(slot, drafts + 1) for slot in decoding]
                step = Step(rows, [Piece(slots - 1, 0, ids, True)], drafting, drafts + 1, sampled=False)
                times[slots, drafts, len(ids)] = _seconds(session, step)
    return times


def _prepared_lengths(session: Session) -> list[int]:
    """Prepares the steps of all draft lengths, 0 alone without a drafter; returns these."""
    config = session.config
    lengths = draft_lengths(config.block_size) if config.drafter is not None else [0]
    session.prepare(Prepare(tuple(lengths) if config.drafter is not None else (), sampled=False))
    return lengths


def _first(slot: int, position: int, config: EngineConfig) -> Step:
    return Step([], [Piece(slot, position, [0], True)], _drafting(0, config), 1, sampled=False)


def _drafting(drafts: int, config: EngineConfig) -> Drafting:
    if config.drafter is None:
        return Drafting.OFF
    return Drafting.BLOCK if drafts else Drafting.CONTEXT


def _seconds(session: Session, step: Step) -> float:
    """Times a step: the median of a few rounds, without the first, which may compile."""
    rounds = []
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        for _ in range(_STEPS):
            outcome = session.run(step)
        outcome.read()
        rounds.append((time.perf_counter() - begin) / _STEPS)
    return statistics.median(rounds[1:])


def measure(session: Session) -> StepTimes:
    """Times each number of slots with each draft length; seconds, the median of a few rounds."""
    config = session.config
    position = min(_POSITION, config.max_seq_len - 1)
    times = {}
    lengths = _prepared_lengths(session)
    # On a GPU every number of slots that has its graphs; a CPU's times lie close to a straight line.
    sizes = batch_sizes(config.max_batch) if session.device.type == "cuda" else sorted({1, config.max_batch})
    for slots in sizes:
        for slot in range(slots):
            session.run(_first(slot, position, config)).read()
        for drafts in lengths:
            drafting = _drafting(drafts, config)
            step = Step([(slot, drafts + 1) for slot in range(slots)], [], drafting, drafts + 1, sampled=False)
            times[slots, drafts] = _seconds(session, step)
    return times


def _machine(session: Session) -> dict[str, str]:
    """Describes what the times depend on besides the engine: the kernels' presence and version among it."""
    device = session.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = str(torch.get_num_threads()) if device.type == "cpu" else ""
    return {
        "device": name,
        "threads": threads,
        "torch": torch.__version__,
        "session": type(session).__name__,
        **session.choice.labels,
    }


def _read(file: Path, machine: dict[str, str]) -> MixedStepTimes | None:
    """Reads the kept times; None where there are none of this machine."""
    try:
        kept = json.loads(file.read_text())
        if kept["machine"] != machine:
            return None
        rows = kept["times"]
        return {(int(slots), int(drafts), int(tokens)): float(seconds) for slots, drafts, tokens, seconds in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, machine: dict[str, str], times: MixedStepTimes) -> None:
    rows = [[*key, seconds] for key, seconds in times.items()]
    aside = file.with_name(f".{file.name}")
    try:
        aside.write_text(json.dumps({"machine": machine, "times": rows}))
        aside.replace(file)
    except OSError:
        aside.unlink(missing_ok=True)  # a directory that cannot be written to is measured at each load
