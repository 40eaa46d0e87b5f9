"""Times decoding steps, plain and drafted, launched as the scheduler launches them, against the floor of each."""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationInfo

from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.bench.random_session import check_kernels, check_room, fill_caches, own_device, random_session
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.floor import Work, floor_seconds, step_work
from trtllm_dflash.cost.gpus import Rates, present_gpu
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.cost.rates import measure_rates
from trtllm_dflash.cost.shapes import SHAPES, asked_precision, find_shape, shape_config, shape_models
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.engine.ladder import LEAST_SHARING, MOST_SHARED_DRAFTS, shared_lengths
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.kernels.delta_net import MOST_KEPT
from trtllm_dflash.llm import LLM
from trtllm_dflash.session.calls import Decode, Piece, Place, Prefill, Prepare, Step
from trtllm_dflash.session.choice import Choice
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.ranks import World
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.threads import limit_threads
from trtllm_dflash.session.trees import DraftTreeChoice, with_trees
from trtllm_dflash.step import Drafting

SCHEMA_VERSION = 1

_BATCH = (1, 8, 32)
_CACHE_LENGTH = 1024


def _numbers(value: Any, info: ValidationInfo) -> Any:
    """Parses "1,8,32" into numbers, each once and in order."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    # Six digits: no count here is longer, and int() has a limit of its own.
    if not all(part.isascii() and part.isdigit() and len(part) <= 6 and int(part) for part in parts):
        raise SettingsError(f"--{info.field_name} {value}: write positive whole numbers, such as 1,8,32")
    return tuple(sorted({int(part) for part in parts}))


Numbers = Annotated[tuple[PositiveInt, ...], BeforeValidator(_numbers)]


class StepBenchSettings(BaseModel):
    """Settings of `bench step`; each field is a flag, None where it was not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Path | None = None
    shape: str | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8-blocks"] | None = None
    tp: PositiveInt | None = None
    layers: PositiveInt | None = None  # of the target
    drafter_precision: Literal["fp8"] | None = None
    kv: Literal["fp8"] | None = None  # of caches
    draft_vocab: PositiveInt | None = None
    device: str = "auto"
    kernels: Kernels = "auto"
    batch: Numbers | None = None
    rows: Numbers | None = None
    cache_length: PositiveInt | None = None
    simulate_acceptance: float | None = None
    draft_tree: DraftTreeChoice | None = None
    share_rows: bool = False
    rounds: PositiveInt = 7
    steps: Annotated[int, Field(ge=2)] = 20  # in a round; the first of them is not timed


@dataclass(frozen=True)
class Arm:
    """A kind of step that is timed: its name, and how it drafts."""

    name: Literal["plain", "context only", "drafted", "shared", "tree"]
    drafting: Drafting
    rows: int  # a slot, that are verified, and without a tree of the block that is drafted
    tree: int = 0  # nodes, drafted out of the whole block; 0: a chain
    shares: bool = False  # whether slots share the rows, of which each has as many on average


@dataclass(frozen=True)
class Line:
    """The times of one arm at one batch."""

    arm: Arm
    batch: int
    cache_length: int
    rounds: list[float]  # seconds a step
    work: list[Work]  # of the target, and of the drafter where it takes part

    @property
    def seconds(self) -> float:
        """Time of a step, the median of the rounds."""
        return statistics.median(self.rounds)


@dataclass
class StepReport:
    """The times of all steps, with the engine, machine and versions that they were measured with."""

    name: str
    config: EngineConfig
    session: str
    choice: Choice
    machine: dict[str, Any]
    versions: dict[str, str]
    rates: Rates
    steps: int  # in a round
    acceptance: ImposedAcceptance | None
    random_weights: bool
    memory_used: int | None = None  # bytes of the first rank's GPU that were not free in the end
    planned: int = 0
    lines: list[Line] = field(default_factory=list)

    def floor(self, line: Line) -> float:
        """Computes the least time of a step, in seconds."""
        return floor_seconds(line.work, self.rates)

    def tokens_per_step(self, line: Line) -> float | None:
        """Tokens that a step commits a slot, under the imposed acceptance."""
        if self.acceptance is None:
            return None
        if line.arm.tree:
            return self.acceptance.of_tree(line.arm.tree)
        return self.acceptance.at(line.arm.rows) if line.arm.drafting is Drafting.BLOCK else 1.0

    def tokens_per_second(self, line: Line) -> float | None:
        """Tokens a second of all slots together, under the imposed acceptance."""
        tokens = self.tokens_per_step(line)
        return None if tokens is None else line.batch * tokens / line.seconds

    def plain(self, line: Line) -> Line:
        """Finds the plain step that was timed by turns with this one."""
        return next(x for x in self.lines if x.batch == line.batch and x.arm.drafting is Drafting.OFF)

    def as_json(self) -> dict[str, Any]:
        """Makes the report as `--json` writes it, without the command."""
        config, acceptance = self.config, self.acceptance
        return {
            "schema_version": SCHEMA_VERSION,
            "machine": self.machine,
            "versions": self.versions,
            "shape": self.name,
            "random_weights": self.random_weights,
            "config": config.model_dump(
                mode="json", include={"backend", "precision", "kv", "tp", "max_batch", "max_seq_len", "block_size"}
            ),
            "target": config.target.model_dump(mode="json"),
            "drafter": config.drafter.model_dump(mode="json") if config.drafter else None,
            "session": self.session,
            "computes": self.choice.labels,
            "copy_bytes_per_second": self.rates.copy,
            "gemm_flops_per_second": self.rates.gemm,
            "memory": {"planned_bytes": plan_memory(config, present_gpu()).total, "used_bytes": self.memory_used},
            "steps_per_round": self.steps,
            "imposed_acceptance": None
            if acceptance is None
            else {"tokens_per_step": acceptance.tokens, "rows": acceptance.block, "survival": acceptance.survival},
            "complete": len(self.lines) == self.planned,
            "rows": [self._row(line) for line in self.lines],
        }

    def _row(self, line: Line) -> dict[str, Any]:
        moved, done, seconds = sum(x.bytes for x in line.work), sum(x.flops for x in line.work), line.seconds
        parts = zip(("target", "drafter"), line.work, strict=False)
        row: dict[str, Any] = {
            "arm": line.arm.name,
            "batch": line.batch,
            "rows": line.arm.rows,
            "cache_length": line.cache_length,
            "seconds": seconds,
            "seconds_by_round": line.rounds,
            "bytes": moved,
            "flops": done,
            "bytes_per_second": moved / seconds,
            "flops_per_second": done / seconds,
            "share_of_copy_rate": moved / seconds / self.rates.copy,
            "floor_seconds": self.floor(line),
            "floor_parts": {
                name: {"bytes": work.bytes, "flops": work.flops, "seconds": work.seconds(self.rates)}
                for name, work in parts
            },
            "gap": seconds / self.floor(line),
            "seconds_over_plain": seconds / self.plain(line).seconds,
        }
        rate, plain = self.tokens_per_second(line), self.tokens_per_second(self.plain(line))
        if rate is not None and plain is not None:
            row["imposed_tokens_per_step"] = self.tokens_per_step(line)
            row["imposed_tokens_per_second"] = rate
            row["imposed_tokens_per_second_over_plain"] = rate / plain
        return row


@dataclass(frozen=True)
class Plan:
    """The arms, batches and lengths to be timed, checked against the engine."""

    config: EngineConfig
    batch: tuple[int, ...]
    arms: list[Arm]
    cache_length: int
    rounds: int
    steps: int
    acceptance: ImposedAcceptance | None


class StepBench:
    """A session, ready to be timed; `report` fills as `run` goes on."""

    def __init__(self, session: Session, plan: Plan, rates: Rates, random_weights: bool) -> None:
        self.session = session
        self.plan = plan
        self.report = StepReport(
            name=plan.config.name,
            config=plan.config,
            session=type(session).__name__,
            choice=session.choice,
            machine=machine(session.device),
            versions=versions(),
            rates=rates,
            steps=plan.steps,
            acceptance=plan.acceptance,
            random_weights=random_weights,
            planned=len(plan.batch) * len(plan.arms),
        )

    def run(self, progress: Progress = lambda what, done, total: None) -> None:
        """Times every arm at every batch; a batch's arms take turns, round by round.

        Raises:
            EngineError: the device's memory ran out.
        """
        plan = self.plan
        lengths = {self._block(arm) - 1 for arm in plan.arms if arm.drafting is not Drafting.OFF}
        shares = any(arm.shares for arm in plan.arms)
        self.session.prepare(Prepare(tuple(sorted(lengths)), sampled=False, shares=shares), progress)
        gpu = present_gpu()
        done, total = 0, len(plan.batch) * len(plan.arms) * (1 + plan.rounds)
        for batch in plan.batch:
            seconds: dict[Arm, list[float]] = {arm: [] for arm in plan.arms}
            for _ in range(1 + plan.rounds):
                for arm in plan.arms:
                    progress(f"timing batch {batch}", done, total)
                    seconds[arm].append(self.timed(arm, batch))
                    done += 1
            for arm in plan.arms:
                block = self._block(arm)
                work = step_work(plan.config, arm.drafting, batch, arm.rows, plan.cache_length, gpu, block)
                # The first round may compile.
                self.report.lines.append(Line(arm, batch, plan.cache_length, seconds[arm][1:], work))
        if self.session.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.session.device)
            self.report.memory_used = total - free

    def timed(self, arm: Arm, batch: int) -> float:
        """Times a step, in seconds from one outcome's arrival to the next one's.

        The slots start so that the round's middle step finds `cache_length` tokens: each step of random weights
        commits one. Steps of single rows write a recurrent state now and then (`MOST_KEPT`): the slots take turns.
        """
        session, plan = self.session, self.plan
        start = max(1, plan.cache_length - plan.steps // 2)
        try:
            for slot in range(batch):
                self._place(slot, start - 1, 0)
                outcome = self._begin(arm, slot, start - 1)
            outcome.read()
            for slot in range(batch):
                beside = min(1 + slot % min(MOST_KEPT, plan.config.block_size), start)
                self._place(slot, start - beside, beside)
            launched: deque[Outcome] = deque()
            read = []
            for launches_left in reversed(range(plan.steps)):
                launched.append(self._step(arm, batch))
                while len(launched) > (session.ahead if launches_left else 0):
                    launched.popleft().read()
                    read.append(time.perf_counter())
        except torch.OutOfMemoryError:
            raise EngineError(f"--batch {batch}: the GPU's memory ran out; use smaller ones") from None
        return (read[-1] - read[0]) / (len(read) - 1)

    def _place(self, slot: int, position: int, beside: int) -> None:
        if self.plan.config.target.delta is not None:
            self.session.place(Place(slot, position, beside))

    def _begin(self, arm: Arm, slot: int, position: int) -> Outcome:
        if not (arm.tree or arm.shares or self._is_paged):
            return self.session.prefill(Prefill(slot, position, [0], True, arm.drafting, arm.rows))
        piece = Piece(slot, position, [0], last=True)
        how = arm.drafting, self._block(arm)
        return self.session.run(Step([], [piece], *how, sampled=False, tree=arm.tree, chances=arm.shares))

    def _step(self, arm: Arm, batch: int) -> Outcome:
        if arm.shares:
            slots, share = [(slot, self.plan.config.block_size) for slot in range(batch)], batch * arm.rows
            return self.session.run(Step(slots, [], arm.drafting, arm.rows, False, chances=True, share=share))
        if not (arm.tree or self._is_paged):
            return self.session.decode(Decode([arm.rows] * batch, arm.drafting, arm.rows, sampled=False))
        slots = [(slot, arm.rows) for slot in range(batch)]
        return self.session.run(Step(slots, [], arm.drafting, self._block(arm), sampled=False, tree=arm.tree))

    @property
    def _is_paged(self) -> bool:
        """Whether caches lie in pages that only whole steps find by their tables: without our kernels."""
        return self.session.paging.width > 1 and getattr(self.session, "library", None) is None

    def _block(self, arm: Arm) -> int:
        return self.plan.config.block_size if arm.tree else arm.rows


# -- from settings to a session --------------------------------------------------------------------------------------


def ranks_of(settings: StepBenchSettings) -> int:
    """Number of processes, one a rank, that the engine needs.

    Raises:
        SettingsError: what is to be timed is not said, or said twice.
        EngineError: there is no such engine.
    """
    if (settings.engine is None) == (settings.shape is None):
        raise SettingsError(f"give one of --engine DIR and --shape NAME; shapes: {', '.join(SHAPES)}")
    if settings.engine is None:
        return settings.tp or 1
    for name in ("precision", "tp", "layers", "drafter_precision", "kv", "draft_vocab"):
        value = getattr(settings, name)
        if value is not None:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: an engine has its own; this goes with --shape")
    return read_config(settings.engine).tp


def make_plan(settings: StepBenchSettings, device: torch.device) -> Plan:
    """Plans what is timed, from the settings and the engine's limits.

    Raises:
        SettingsError: the engine or the shape has not the rows, slots or positions; names the flag.
    """
    batch, length = settings.batch or _BATCH, settings.cache_length or _CACHE_LENGTH
    if settings.engine is not None:
        config = read_config(settings.engine)
        batch, length = _within(settings, config, batch, length)
    else:
        assert settings.shape is not None
        spare = find_shape(settings.shape).block_size
        _check_positions(settings, length, spare)
        config = shape_config(
            settings.shape,
            layers=settings.layers,
            draft_vocab=settings.draft_vocab,
            drafter_precision=settings.drafter_precision,
            **asked_precision(settings.precision, device),
            kv=settings.kv,
            tp=settings.tp or 1,
            max_batch=max(batch),
            max_seq_len=length + settings.steps + spare,
            chunk=spare,
        )
    config = with_trees(config, settings.draft_tree or "off", device, settings.kernels)
    most = config.block_size if config.drafter else 1
    rows = settings.rows or tuple(sorted({1, -(-most // 2), most}))
    if max(rows) > most:
        limit = f"the drafter's block has {most} rows" if config.drafter else "without a drafter a step has 1 row"
        raise SettingsError(f"--rows {max(rows)}: {limit}")
    arms = [Arm("plain", Drafting.OFF, 1)]
    if config.drafter is not None and 1 in rows:
        arms.append(Arm("context only", Drafting.CONTEXT, 1))
    tree = config.draft_tree  # takes the place of the whole block's chain
    arms += [Arm("drafted", Drafting.BLOCK, count) for count in rows if 1 < count < most + (not tree)]
    if settings.share_rows:
        arms += _shared_arms(config, device, settings.kernels, rows, min(batch))
    if tree:
        arms.append(Arm("tree", Drafting.BLOCK, tree + 1, tree))
    imposed = settings.simulate_acceptance
    acceptance = None if imposed is None else ImposedAcceptance(imposed, most)
    return Plan(config, batch, arms, length, settings.rounds, settings.steps, acceptance)


def _check_positions(settings: StepBenchSettings, length: int, spare: int) -> None:
    """Checks that a shape takes the tokens of a slot, a round's steps and a block besides."""
    assert settings.shape is not None
    positions, needed = shape_models(settings.shape)[0].max_positions, length + settings.steps + spare
    if needed > positions:
        flag = "--steps" if settings.steps > length else "--cache-length"
        raise SettingsError(
            f"{flag} {max(settings.steps, length)}: --shape {settings.shape} takes {positions} positions, not the "
            f"{needed} of a slot's tokens (--cache-length), a round's steps (--steps) and a block"
        )


def _shared_arms(
    config: EngineConfig, device: torch.device, kernels: Kernels, rows: tuple[int, ...], slots: int
) -> list[Arm]:
    """Lists the arms whose slots share their rows.

    Raises:
        SettingsError: slots share none there.
    """
    known = [count for count in rows if count - 1 in shared_lengths(config.block_size)]
    is_captured = device.type == "cuda" and kernels == "auto" and config.dtype != torch.float32
    if not known or slots < LEAST_SHARING or not (is_captured and config.may_share_rows):
        least, most = LEAST_SHARING, MOST_SHARED_DRAFTS + 1
        raise SettingsError(
            f"--share-rows: {least} slots and more (--batch) share 2 to {most} rows each (--rows), less than a block, "
            "on one GPU with our kernels, of targets without gated delta nets and drafters but DFlash 2 and DSpark"
        )
    return [Arm("shared", Drafting.BLOCK, count, shares=True) for count in known]


def _within(
    settings: StepBenchSettings, config: EngineConfig, batch: tuple[int, ...], length: int
) -> tuple[tuple[int, ...], int]:
    """Fits batches and length to an engine's own limits: defaults give way, flags that exceed them are refused."""
    if settings.batch is None:
        batch = tuple(count for count in batch if count <= config.max_batch)
    elif max(batch) > config.max_batch:
        raise SettingsError(f"--batch {max(batch)}: the engine has {config.max_batch} slots (build --max-batch)")
    most = config.max_seq_len - 1 - settings.steps
    if most < 1:
        raise SettingsError(
            f"--steps {settings.steps}: slots of {config.max_seq_len} tokens have room for fewer in a round; give it "
            "fewer, or build with a larger --max-seq-len"
        )
    if settings.cache_length is None:
        length = min(length, most)
    if not 1 <= length <= most:
        raise SettingsError(
            f"--cache-length {length}: with {settings.steps} steps in a round (--steps) this engine of "
            f"{config.max_seq_len} tokens has room for {most}"
        )
    return batch, length


@contextmanager
def open_bench(settings: StepBenchSettings) -> Iterator[StepBench | None]:
    """Opens the bench of these settings, and closes its session at the end; None on a rank that followed the first one.

    Raises:
        SettingsError: a setting that contradicts another, or the engine.
        EngineError: the engine, the device or its memory is not what is needed.
    """
    tp = ranks_of(settings)
    device = pick_device(settings.device)
    plan = make_plan(settings, device)
    if settings.engine is not None:
        limit_threads(read_config(settings.engine))
        session = LLM.load(
            settings.engine, settings.device, settings.kernels, prepare=False, draft_tree=settings.draft_tree or "off"
        ).session
    else:
        world = World(tp)
        with world.together():
            device = own_device(device, world)
            check_kernels(plan.config, device, settings.kernels)
            check_room(plan.config, device)
        session = random_session(plan.config, device, world, kernels=settings.kernels)
    try:
        fill_caches(session)
        if session.communicator.rank != 0:
            session.follow()
            yield None
        else:
            rates = measure_rates(session.device, plan.config.dtype)
            yield StepBench(session, plan, rates, random_weights=settings.engine is None)
    finally:
        session.close()
