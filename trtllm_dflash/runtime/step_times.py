"""Times of a step on this machine, by slots, drafts and prompt tokens: measured once, and kept with the engine."""

import json
import math
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from trtllm_dflash.engine.ladder import LEAST_SHARING, batch_sizes, prompt_sizes
from trtllm_dflash.runtime.draft_length import StepTimes
from trtllm_dflash.runtime.prefill_budget import MixedStepTimes
from trtllm_dflash.session.calls import Piece, Place, Prepare, Step
from trtllm_dflash.session.session import Session
from trtllm_dflash.step import Drafting

FILE = "step_times.json"

_POSITION = 256  # tokens that the measured slots hold
_ROUNDS = 2
_STEPS = 2  # in a round on a GPU, which begins one while the host makes the next


def step_times(session: Session, folder: Path | None, lengths: Sequence[int], shared: bool = False) -> MixedStepTimes:
    """Finds the engine's step times on this machine: kept in its directory, or else measured now and kept there.

    Measuring captures and runs the steps that it times, and no others; it writes over the caches' rows.

    Args:
        folder: the engine's directory, where there is one.
        lengths: of drafts, as in `Prepare`: none at all for steps that have nothing of the drafter.
        shared: whether they are those of steps whose slots share rows, none of which reads prompts.
    """
    machine, kind = _machine(session), _kind(session, lengths, shared)
    kept = _read(folder / FILE, machine) if folder is not None else {}
    sizes = _sizes(session, shared)  # of an engine that was built otherwise, others may be kept
    times = {key: seconds for key, seconds in kept.get(kind, {}).items() if key[0] in sizes}
    mixes = session.limits.mixes and session.device.type == "cuda" and not shared
    if mixes and not any(tokens for *_, tokens in times):
        times = {}
    missing = [drafts for drafts in lengths or [0] if any((slots, drafts, 0) not in times for slots in sizes)]
    if not missing:
        return times
    missing = missing if lengths else []
    times |= {(slots, drafts, 0): seconds for (slots, drafts), seconds in measure(session, missing, shared).items()}
    if mixes:
        times |= measure_mixed(session, missing)
    if folder is not None:
        _write(folder / FILE, machine, {**kept, kind: times})
    return times


def _kind(session: Session, lengths: Sequence[int], shared: bool) -> str:
    if not lengths:
        return "plain"
    nodes = session.config.draft_tree
    return ("drafting" if not nodes else f"drafting trees of {nodes}") + (", rows shared" if shared else "")


def decoding_times(times: MixedStepTimes, lengths: Sequence[int]) -> StepTimes:
    """Takes the times of steps that decode alone, with these draft lengths."""
    return {
        (slots, drafts): seconds
        for (slots, drafts, tokens), seconds in times.items()
        if not tokens and drafts in lengths
    }


def measure(session: Session, lengths: Sequence[int], shared: bool = False) -> StepTimes:
    """Times each number of slots with each draft length (as in `step_times`); seconds, the median of a few rounds."""
    config = session.config
    position = min(_POSITION, config.max_seq_len - 1)
    session.prepare(Prepare(tuple(lengths), sampled=False, shares=shared))
    times = {}
    for slots in _sizes(session, shared):
        for slot in range(slots):
            _begin(session, slot, position, lengths)
        for drafts in lengths or [0]:
            times[slots, drafts] = _seconds(session, _step(session, range(slots), [], drafts, lengths, shared))
    return times


def _sizes(session: Session, shared: bool) -> list[int]:
    """Lists the numbers of slots that are timed."""
    most = session.config.max_batch
    # On a GPU every number of slots that has its graphs; a CPU's times lie close to a straight line.
    sizes = batch_sizes(most) if session.device.type == "cuda" else sorted({1, most})
    return [slots for slots in sizes if slots >= LEAST_SHARING] if shared else sizes


def measure_mixed(session: Session, lengths: Sequence[int]) -> MixedStepTimes:
    """Times steps that read prompts beside few and many slots, with few and many drafts of `lengths`, as `measure`."""
    config = session.config
    session.prepare(Prepare(tuple(lengths), sampled=False))
    times = {}
    every = list(lengths) or [0]
    few = {every[0], *every[3:4], *every[5:6], every[-1]}
    for slots in {*batch_sizes(config.max_batch)[-3:-2], config.max_batch}:
        decoding = range(slots - 1)  # the last slot reads
        for slot in decoding:
            _begin(session, slot, min(_POSITION, config.max_seq_len - 1), lengths)
        for drafts in few:
            for tokens in prompt_sizes(config.chunk):
                ids = [0] * min(tokens, session.limits.prompt_rows, config.max_seq_len - 1)
                piece = Piece(slots - 1, 0, ids, True)
                step = _step(session, decoding, [piece], drafts, lengths)
                times[slots, drafts, len(ids)] = _seconds(session, step)
    return times


def _step(
    session: Session,
    slots: Sequence[int],
    pieces: list[Piece],
    drafts: int,
    lengths: Sequence[int],
    shared: bool = False,
) -> Step:
    """Makes the step of these slots and pieces that the scheduler makes of so many drafts."""
    longest, drafting = session.config.block_size - 1, _drafting(drafts, lengths)
    if shared:
        rows, share = [(slot, longest + 1) for slot in slots], len(slots) * (drafts + 1)
        return Step(rows, pieces, drafting, drafts + 1, sampled=False, chances=True, share=share)
    tree = session.config.draft_tree if drafts == longest else 0
    rows = [(slot, (tree or drafts) + 1) for slot in slots]
    return Step(rows, pieces, drafting, drafts + 1, sampled=False, tree=tree)


def _begin(session: Session, slot: int, position: int, lengths: Sequence[int]) -> None:
    """Lets a slot stand at a position, whatever lies before it, and gives it its next rows."""
    if session.config.target.delta is not None:
        session.place(Place(slot, position))
    session.run(Step([], [Piece(slot, position, [0], True)], _drafting(0, lengths), 1, sampled=False)).read()


def _drafting(drafts: int, lengths: Sequence[int]) -> Drafting:
    if not lengths:
        return Drafting.OFF
    return Drafting.BLOCK if drafts else Drafting.CONTEXT


def _seconds(session: Session, step: Step) -> float:
    """Times a step: the median of a few rounds, without the first, which may compile."""
    rounds = []
    steps = _STEPS if session.device.type == "cuda" else 1
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        for _ in range(steps):
            outcome = session.run(step)
        outcome.read()
        rounds.append((time.perf_counter() - begin) / steps)
    return statistics.median(rounds[1:])


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
        "rows": "flat" if session.limits.mixes else "by slot",  # of which alone others lie beside prompts
        **session.choice.labels,
    }


def _read(file: Path, machine: dict[str, str]) -> dict[str, MixedStepTimes]:
    """Reads the kept times of steps that draft, and of plain ones; none where there are none of this machine."""
    try:
        kept = json.loads(file.read_text())
        if kept["machine"] != machine:
            return {}
        times = {
            kind: {(int(slots), int(drafts), int(tokens)): float(seconds) for slots, drafts, tokens, seconds in rows}
            for kind, rows in kept["times"].items()
        }
        are_times = all(0 < seconds < math.inf for of in times.values() for seconds in of.values())
        return times if are_times else {}
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _write(file: Path, machine: dict[str, str], times: dict[str, MixedStepTimes]) -> None:
    rows = {kind: [[*key, seconds] for key, seconds in of.items()] for kind, of in times.items()}
    aside = file.with_name(f".{file.name}")
    try:
        aside.write_text(json.dumps({"machine": machine, "times": rows}))
        aside.replace(file)
    except OSError:  # a directory that cannot be written to is measured at each load
        with suppress(OSError):
            aside.unlink(missing_ok=True)
