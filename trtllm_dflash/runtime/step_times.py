"""Times of a decoding step on this machine, by slots and drafts: measured once, and kept with the engine."""

import json
import platform
import statistics
import time
from pathlib import Path

import torch

from trtllm_dflash.engine.ladder import batch_sizes, draft_lengths
from trtllm_dflash.runtime.draft_length import StepTimes
from trtllm_dflash.session.calls import Piece, Prepare, Step
from trtllm_dflash.session.session import Session
from trtllm_dflash.step import Drafting

FILE = "step_times.json"

_POSITION = 256  # tokens that the measured slots hold
_ROUNDS = 2
_STEPS = 2  # in a round


def step_times(session: Session, folder: Path | None) -> StepTimes:
    """Finds the engine's step times on this machine: kept in its directory, or else measured now and kept there.

    Measuring writes over the caches' rows.
    """
    machine = _machine(session)
    kept = _read(folder / FILE, machine) if folder is not None else None
    if kept is not None:
        return kept
    times = measure(session)
    if folder is not None:
        _write(folder / FILE, machine, times)
    return times


def measure(session: Session) -> StepTimes:
    """Times each number of slots with each draft length; seconds, the median of a few rounds."""
    config = session.config
    position = min(_POSITION, config.max_seq_len - 1)
    times = {}
    lengths = draft_lengths(config.block_size)
    session.prepare(Prepare(tuple(lengths), sampled=False))
    # On a GPU every number of slots that has its graphs; a CPU's times lie close to a straight line.
    sizes = batch_sizes(config.max_batch) if session.device.type == "cuda" else sorted({1, config.max_batch})
    for slots in sizes:
        for slot in range(slots):
            piece = Piece(slot, position, [0], last=True)
            session.run(Step([], [piece], Drafting.CONTEXT, 1, sampled=False)).read()
        for drafts in lengths:
            drafting = Drafting.BLOCK if drafts else Drafting.CONTEXT
            step = Step([(slot, drafts + 1) for slot in range(slots)], [], drafting, drafts + 1, sampled=False)
            rounds = []
            for _ in range(1 + _ROUNDS):
                begin = time.perf_counter()
                for _ in range(_STEPS):
                    outcome = session.run(step)
                outcome.read()
                rounds.append((time.perf_counter() - begin) / _STEPS)
            times[slots, drafts] = statistics.median(rounds[1:])  # the first one may compile
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


def _read(file: Path, machine: dict[str, str]) -> StepTimes | None:
    """Reads the kept times; None where there are none of this machine."""
    try:
        kept = json.loads(file.read_text())
        if kept["machine"] != machine:
            return None
        return {(int(slots), int(drafts)): float(seconds) for slots, drafts, seconds in kept["times"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, machine: dict[str, str], times: StepTimes) -> None:
    rows = [[slots, drafts, seconds] for (slots, drafts), seconds in times.items()]
    aside = file.with_name(f".{file.name}")
    try:
        aside.write_text(json.dumps({"machine": machine, "times": rows}))
        aside.replace(file)
    except OSError:
        aside.unlink(missing_ok=True)  # a directory that cannot be written to is measured at each load
