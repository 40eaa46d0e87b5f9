"""`build --plan --at`: the throughput of a node at a speed for each user, plain, with DFlash and with EAGLE-3.

Engines of 1, 2, 4 and 8 ranks are compared, each as often as the node has GPUs for, all with the same load.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Literal

from pydantic import BaseModel

from trtllm_dflash.build.assumptions import assumptions, error_bound
from trtllm_dflash.build.plan import PlanSettings, check_plan, largest, planned_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.cost.acceptance import ImposedAcceptance, check_acceptance
from trtllm_dflash.cost.eagle3 import VOCABULARY, Eagle3Count, Eagle3Draft
from trtllm_dflash.cost.floor import StepCount
from trtllm_dflash.cost.gpus import GPUS, PublishedGPU, find_gpu
from trtllm_dflash.cost.memory import check_fits, fits_in, pages_on_gpu
from trtllm_dflash.cost.prediction import predict_parts, predict_step
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.ladder import draft_lengths
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.step import Drafting

#: GPUs of a node, and the ranks of an engine that is compared.
NODE = 8
RANKS = (1, 2, 4, 8)

_MOST_BATCH = 1024  # slots of an engine
_GROWTH = 1.08  # from one batch that is looked at to the next, beyond those of few slots
_FEW = 32

Method = Literal["plain", "DFlash", "EAGLE-3"]


class Published(BaseModel):
    """Ratios of DFlash's throughput that somebody published, between two speeds of each user."""

    slowest: float  # tokens/s
    fastest: float
    over_plain: str
    over_eagle3: str
    source: str


#: By pair and GPU.
PUBLISHED_RATIOS = {
    ("gpt-oss-120b", "b300"): Published(
        slowest=500,
        fastest=600,
        over_plain="over 15x",
        over_eagle3="1.5x",
        source="8 B300s, TensorRT-LLM, SPEED-Bench coding: developer.nvidia.com/blog/boost-inference-performance-up-to-"
        "15x-on-nvidia-blackwell-using-dflash-speculative-decoding",
    )
}


class OperatingSettings(BaseModel):
    """Settings of `build --plan --at`, besides those of `build --plan`."""

    at: tuple[float, ...]  # tokens/s of each user
    eagle3_acceptance: float | None = None  # tokens a step; None leaves EAGLE-3 out
    eagle3_drafts: str = "3"


class Operation(BaseModel):
    """A node that runs equal engines with the same number of slots each.

    Attributes:
        batch: slots of each engine.
        drafts: that are verified.
        tokens_per_second: of the whole node.
    """

    method: Method
    tp: int
    replicas: int
    batch: int
    drafts: int
    tokens_per_step: float
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_user: float


class AtSpeed(BaseModel):
    """The operation of each method with the most throughput at a speed; None where it does not reach that speed."""

    tokens_per_second_per_user: float
    best: dict[Method, Operation | None]

    def over(self, method: Method, other: Method) -> float | None:
        """The ratio of two methods' throughputs; None where one does not reach the speed, or is not planned."""
        mine, others = self.best.get(method), self.best.get(other)
        return None if mine is None or others is None else mine.tokens_per_second / others.tokens_per_second


class OperatingPlan(BaseModel):
    """A node's plan at fixed speeds, as `--json` writes it.

    Attributes:
        fastest: tokens/s of one user alone, by method.
        frontier: by method, operations that none other of it exceeds in both, the fastest first.
        too_large: ranks of engines that do not fit the GPU, with the reason.
    """

    schema_version: Literal[1] = 1
    kind: Literal["operating-plan"] = "operating-plan"
    command: str = ""
    model: str
    gpu: str
    gpus: int = NODE
    precision: str
    cache_length: int
    max_seq_len: int
    acceptance: float
    eagle3_acceptance: float | None
    eagle3_drafts: str | None
    points: list[AtSpeed]
    fastest: dict[Method, float]
    frontier: dict[Method, list[Operation]]
    published: Published | None
    error_bound: float
    too_large: dict[int, str]
    assumptions: list[str]


class OperatingComparison(BaseModel):
    """Plans of every known GPU, as `--json` writes them where none is named."""

    schema_version: Literal[1] = 1
    kind: Literal["operating-plans"] = "operating-plans"
    command: str = ""
    plans: list[OperatingPlan]
    refused: dict[str, str]  # GPU -> the reason


def compare_operations(
    build: BuildSettings, settings: PlanSettings, operating: OperatingSettings
) -> OperatingComparison:
    """Plans a node of every known GPU.

    Raises:
        SettingsError: a setting does not fit the model.
    """
    plans, refused, wrong = [], {}, []
    for gpu in GPUS:
        try:
            plans.append(plan_operation(build, settings.model_copy(update={"gpu": gpu}), operating))
        except (EngineError, SettingsError) as error:
            refused[gpu] = str(error)
            wrong += [error] if isinstance(error, SettingsError) else []
    if len(wrong) == len(GPUS):
        raise wrong[0]
    return OperatingComparison(plans=plans, refused=refused)


def plan_operation(build: BuildSettings, settings: PlanSettings, operating: OperatingSettings) -> OperatingPlan:
    """Plans a node of the GPU that the settings name.

    Raises:
        SettingsError: the GPU or the model's shape is not known, or a setting does not fit the model.
        EngineError: no engine fits that GPU.
    """
    gpu = find_gpu(settings.gpu or "")
    if settings.acceptance is None:
        raise SettingsError("--at: say with --acceptance how many tokens a step commits with the drafter's whole block")
    if build.tp > NODE:
        raise SettingsError(f"--tp {build.tp}: --at plans a node of {NODE} GPUs; at most {NODE}")
    draft = Eagle3Draft.parse(operating.eagle3_drafts)
    if operating.eagle3_acceptance is not None:
        check_acceptance("--eagle3-acceptance", operating.eagle3_acceptance, draft.passes + 1)
    engines, too_large = _engines(build, settings, gpu)
    found: dict[Method, list[Operation]] = {"plain": [], "DFlash": []}
    length = settings.cache_length or min(1024, engines[0].max_seq_len - 1)
    for engine in engines:
        node = _Node(engine, gpu, build, length)
        found["plain"] += node.plain()
        found["DFlash"] += node.dflash(settings.acceptance)
        if operating.eagle3_acceptance is not None:
            found.setdefault("EAGLE-3", []).extend(node.eagle3(operating.eagle3_acceptance, draft))
    drafted = operating.eagle3_acceptance is not None
    return OperatingPlan(
        model=engines[0].name,
        gpu=gpu.name,
        precision=engines[0].precision,
        cache_length=length,
        max_seq_len=engines[0].max_seq_len,
        acceptance=settings.acceptance,
        eagle3_acceptance=operating.eagle3_acceptance,
        eagle3_drafts=str(draft) if drafted else None,
        points=[_at(speed, found) for speed in operating.at],
        fastest={method: max(each.tokens_per_second_per_user for each in all_) for method, all_ in found.items()},
        frontier={method: _frontier(all_) for method, all_ in found.items()},
        published=PUBLISHED_RATIOS.get((engines[0].name, gpu.name)),
        error_bound=error_bound(engines[0]),
        too_large=too_large,
        assumptions=[
            *_assumed(draft if drafted else None, engines[0].max_seq_len),
            *assumptions(engines[-1], gpu, settings.acceptance),
        ],
    )


def _engines(
    build: BuildSettings, settings: PlanSettings, gpu: PublishedGPU
) -> tuple[list[EngineConfig], dict[int, str]]:
    """Configures the engines that fit: with as many ranks as were asked for, else with each number of them."""
    engines, too_large = [], {}
    if build.max_seq_len is None and build.limits is not None:  # the same for all of them
        build = build.model_copy(update={"max_seq_len": build.limits.max_seq_len})
    for tp in (build.tp,) if "tp" in build.model_fields_set else RANKS:
        try:
            config = planned_engine(build.model_copy(update={"tp": tp}), gpu.name)
        except SettingsError as error:
            if "tp" in build.model_fields_set or tp == 1:
                raise
            too_large[tp] = str(error)
            continue
        check_plan(config, settings)
        try:
            check_fits(config if build.max_batch is not None else _smallest(config), gpu.name)
        except EngineError as error:
            too_large[tp] = str(error)
            continue
        engines.append(config)
    if not engines:
        raise EngineError(next(reversed(too_large.values())))
    return engines, too_large


def _smallest(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"max_batch": 1})


class _Node:
    """A node's equal engines, and the steps that they are predicted to take."""

    def __init__(self, engine: EngineConfig, gpu: PublishedGPU, build: BuildSettings, length: int) -> None:
        self._engine, self._gpu, self._length = engine, gpu, length
        self._most = build.max_batch or _MOST_BATCH

    def plain(self) -> Iterator[Operation]:
        engine = self._engine.model_copy(update={"drafter": None, "block_size": 1})
        count = StepCount(engine, self._gpu)
        for batch in self._batches(engine, 0):
            seconds = predict_step(count, self._gpu, Drafting.OFF, batch, 1, self._length).seconds
            yield self._operation("plain", batch, 0, 1.0, seconds)

    def dflash(self, acceptance: float) -> Iterator[Operation]:
        engine = self._engine
        assert engine.drafter is not None  # `check_plan` saw an acceptance
        count, imposed = StepCount(engine, self._gpu), ImposedAcceptance(acceptance, engine.drafter.step_rows)
        for batch in self._batches(engine, 0):
            for drafts in draft_lengths(engine.block_size)[1:]:
                seconds = predict_step(count, self._gpu, Drafting.BLOCK, batch, drafts + 1, self._length).seconds
                yield self._operation("DFlash", batch, drafts, imposed.at(drafts + 1), seconds)

    def eagle3(self, acceptance: float, draft: Eagle3Draft) -> Iterator[Operation]:
        engine = self._engine.model_copy(update={"drafter": None, "block_size": draft.rows})
        count, drafter = StepCount(engine, self._gpu), Eagle3Count(engine)
        imposed = ImposedAcceptance(acceptance, draft.passes + 1)
        drafts = [Eagle3Draft(n, 1, n + 1) for n in range(1, draft.passes + 1)] if draft.is_chain else [draft]
        for batch in self._batches(engine, drafter.bytes):
            for each in drafts:
                verified = count.parts(Drafting.OFF, batch, each.rows, self._length)
                parts = [*verified, *drafter.parts(each, batch, self._length)]
                seconds = predict_parts(engine, self._gpu, parts).seconds
                yield self._operation("EAGLE-3", batch, each.rows - 1, imposed.at(each.passes + 1), seconds)

    def _batches(self, engine: EngineConfig, besides: int) -> Iterator[int]:
        """Lists the numbers of slots to look at, up to the most that fit with so many bytes besides."""
        room = self._gpu.usable_bytes - besides
        gpu = self._gpu
        rows = self._length + engine.block_size

        def fits(slots: int) -> bool:
            config = engine.model_copy(update={"max_batch": slots})
            if not fits_in(room, config, gpu):
                return False
            paging = pages_on_gpu(config, gpu)
            return config.kv_memory is None or slots * -(-rows // paging.rows) <= paging.pages

        most = largest(0, self._most, fits)
        yield from takewhile(lambda batch: batch < most, _batches())
        if most:
            yield most

    def _operation(self, method: Method, batch: int, drafts: int, tokens: float, seconds: float) -> Operation:
        replicas = NODE // self._engine.tp
        return Operation(
            method=method,
            tp=self._engine.tp,
            replicas=replicas,
            batch=batch,
            drafts=drafts,
            tokens_per_step=tokens,
            seconds=seconds,
            tokens_per_second=replicas * batch * tokens / seconds,
            tokens_per_second_per_user=tokens / seconds,
        )


def _batches() -> Iterator[int]:
    yield from range(1, _FEW + 1)
    batch = float(_FEW)
    while True:
        batch *= _GROWTH
        yield round(batch)


def _at(speed: float, found: dict[Method, list[Operation]]) -> AtSpeed:
    best: dict[Method, Operation | None] = {}
    for method, operations in found.items():
        fast = [each for each in operations if each.tokens_per_second_per_user >= speed]
        best[method] = max(fast, key=lambda each: each.tokens_per_second, default=None)
    return AtSpeed(tokens_per_second_per_user=speed, best=best)


def _frontier(operations: list[Operation]) -> list[Operation]:
    frontier: list[Operation] = []
    for each in sorted(operations, key=lambda each: (-each.tokens_per_second_per_user, -each.tokens_per_second)):
        if not frontier or each.tokens_per_second > frontier[-1].tokens_per_second:
            frontier.append(each)
    return frontier


def _assumed(draft: Eagle3Draft | None, max_seq_len: int) -> list[str]:
    notes = [
        f"Node: {NODE} GPUs, with engines of as many ranks as give the most throughput at that speed, all of them at "
        f"work on the same load; each slot has room for {max_seq_len:,} tokens, and a user's speed is every slot's."
    ]
    if draft is not None:
        notes.append(
            f"EAGLE-3: {draft}; its drafter is counted as published ones are (one layer, {VOCABULARY:,} tokens to "
            "draft from), and each of its passes predicted as a layer of ours. None of its steps has been compared."
        )
    return notes
