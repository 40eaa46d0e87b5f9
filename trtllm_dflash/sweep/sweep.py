"""`sweep`: throughput at every load, or the largest load that meets a target, of one arm or of several by turns."""

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.engine.directory import CONFIG_FILE
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.sweep.dataset import Dataset
from trtllm_dflash.sweep.load import Amount, Arm, ClosedLoop, Load, Target, Traffic, Traits, run_load
from trtllm_dflash.sweep.results import ACCEPTANCE, CSV, FILE, PARETO, REPORT, Limit, Results, check_free, read_results
from trtllm_dflash.sweep.runtime_metrics import SETTLE_SECONDS, Reading
from trtllm_dflash.sweep.settings import SweepSettings
from trtllm_dflash.sweep.summary import Counted, Point, Round, summarize

#: Told what is measured, how much of that is done, and of how much.
Progress = Callable[[str, int, int], None]

_RATE_TOLERANCE = 1.05  # between the largest rate that meets a target and the smallest that does not
_SMALLEST_RATE = 1 / 64  # of the largest


def plan_results(settings: SweepSettings, dataset: Dataset, **about: Any) -> Results:
    """Makes results without rounds yet.

    Args:
        about: further fields of `Results`: engine, gpus, imposed_acceptance, machine.
    """
    params = settings.params
    asked: dict[str, Any] = {
        "target": _writable(_target_name(settings)),
        "arms": list(settings.arms),
        "arrival": (settings.arrival or "poisson") if settings.open_loop else None,
        "requests": settings.requests,
        "seconds": settings.seconds,
        "warmup": settings.warmup,
        "rounds": settings.rounds_a_point,
        "sampling": params.model_dump(include={"temperature", "top_k", "top_p", "seed"}),
        "output_tokens" if params.ignore_eos else "max_tokens": params.max_tokens,
    }
    asked |= {"ramp": settings.ramp} if settings.ramp else {}
    drafting = ("draft_length", "draft_tree", "layers", "drafter_precision", "draft_vocab")  # in this process
    asked |= {name: value for name in drafting if (value := getattr(settings, name)) is not None}
    warnings = []
    if dataset.random_tokens:
        warnings.append("the prompts are random tokens: no figure here says what text would give")
    about.setdefault("machine", machine())
    target = {"percentile": float(settings.slo_percentile)}
    target |= {"tokens_per_second_per_user": settings.slo_tps} if settings.slo_tps else {}
    target |= {"ttft_seconds": settings.slo_ttft_ms / 1e3} if settings.slo_ttft_ms else {}
    return Results(
        label=_writable(settings.label or (", ".join(settings.servers) or asked["target"])),
        versions=versions(),
        command=tidy_command(sys.argv[1:]),
        dataset={"name": _writable(dataset.name), "samples": len(dataset.samples), "sha256": dataset.digest},
        asked=asked,
        load_unit="requests/s" if settings.open_loop else "clients",
        warnings=warnings,
        target=target if settings.searches else None,
        categories=[sample.category for sample in dataset.samples],
        **about,
    )


def _target_name(settings: SweepSettings) -> str:
    if settings.servers:
        return ", ".join(f"{arm} at {url}" for arm, url in settings.servers.items())
    if settings.url is not None:
        return f"{settings.model or 'served model'} at {settings.url}"
    return f"{settings.shape}, random weights" if settings.shape else str((settings.engine or Path()).name)


def tidy_command(arguments: list[str]) -> str:
    """Shortens a command for reports: of whole paths only the last part, and no key."""
    shown = []
    for argument in arguments:
        flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        shown.append(flag + equals + (Path(value).name if Path(value).is_absolute() else value))
    return _writable(shlex.join(["trtllm-dflash", *shown]))


def _writable(text: str) -> str:
    """Replaces bytes of names that are not UTF-8, which no report could hold."""
    return text.encode(errors="replace").decode()


def open_results(fresh: Results, folder: Path, resume: bool, force: bool) -> Results:
    """Chooses the results to go on with: fresh ones, or those in the folder.

    Raises:
        SettingsError: the folder has some, and neither `resume` nor `force` is set; or they have other settings; or it
            is an engine's, which a build may replace.
    """
    if (folder / CONFIG_FILE).exists():
        raise SettingsError(f"--output {folder}: has a {CONFIG_FILE}, as engines do; name another folder")
    if not (folder / FILE).exists() or force:
        if resume and not force:
            raise SettingsError(f"--resume: there is no {FILE} in {folder}")
        if not force:
            check_free(folder, (PARETO, ACCEPTANCE, REPORT, CSV))
        folder.mkdir(parents=True, exist_ok=True)
        return fresh
    if not resume:
        raise SettingsError(f"--output {folder}: has results; give --resume to go on, --force to begin anew")
    kept = read_results(folder)
    same, before = _conditions(fresh), _conditions(kept)
    for name in same.keys() | before.keys():
        if same.get(name) != before.get(name):
            raise SettingsError(f"--resume: {name} was {before.get(name)}, and is {same.get(name)} now")
    # Requests that failed are asked again: the server may have gone away among them.
    resumed = fresh.model_copy(update={"rounds": [round_ for round_ in kept.rounds if not round_.errors]})
    resumed.count(())  # the points, which are shown though nothing more be measured
    return resumed


def _conditions(results: Results) -> dict[str, Any]:
    """Names what all rounds of a sweep must share; where the engine is in this process, its GPU and kernels too."""
    conditions = {
        "dataset": results.dataset,
        "load_unit": results.load_unit,
        "gpus": results.gpus,
        "imposed_acceptance": results.imposed_acceptance,
        **results.asked,
    }
    if results.engine is not None:
        conditions |= {"gpu": results.machine.get("gpu")}
        # As many slots as clients, of random weights.
        conditions |= {name: value for name, value in results.engine.items() if name != "max_batch"}
    return conditions


class Sweep:
    """Measures a target; `results` fill, and are written, round by round.

    Args:
        results: fresh ones, or those to go on with: their rounds are not measured again.
        folder: where they are written.
        progress: called for the sweep, and for the round that runs.
    """

    def __init__(
        self,
        settings: SweepSettings,
        dataset: Dataset,
        target: Target,
        results: Results,
        folder: Path,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        self.settings, self.dataset, self.results = settings, dataset, results
        self._target, self._folder, self._progress = target, folder, progress

    async def run(self) -> None:
        """Measures what is not yet measured.

        Raises:
            EngineError: a round had nothing but errors.
            DFlashError: the target does not answer, or does not support these settings.
        """
        settings = self.settings
        await self._target.check(settings.arms, settings.params)
        if settings.searches:
            for arm in settings.arms:
                self._keep_limit(await self._search(arm))
        else:
            loads = settings.grid()
            done, total = 0, len(loads) * settings.rounds_a_point * len(settings.arms)
            for load in loads:
                for number in range(settings.rounds_a_point):
                    for arm in settings.arms[:: 1 if number % 2 == 0 else -1]:
                        self._progress("sweep", done, total)
                        await self._round(arm, load, number)
                        done += 1
            self._progress("sweep", total, total)
        self.results.complete = True
        self._write()

    async def _round(self, arm: Arm, load: float, number: int) -> None:
        rounds = self.results.rounds
        if any((round_.arm, round_.load, round_.round) == (arm, load, number) for round_ in rounds):
            return
        settings, amount = self.settings, self.settings.amount(load)
        unit = self.results.load_unit
        warmup = settings.warmup if settings.warmup is not None else (4 if settings.open_loop else int(load))
        samples = len(self.dataset.samples)
        what = f"{arm}, {load:g} {unit}"
        if warmup:
            # From the dataset's other end: a prompt that is measured must not find rows that its own warm-up left.
            traits = Traits(settings.params, arm, first_sample=max(0, samples - warmup))
            clients = ClosedLoop(min(warmup, int(load) if not settings.open_loop else 4))
            await self._load(f"{what}: warming up", clients, Amount(requests=warmup), traits)
        before = await self._target.look(arm)
        if before is not None and not before.is_live:  # what the warm-up drafted is in it only later
            await asyncio.sleep(SETTLE_SECONDS)
            before = await self._target.look(arm)
        first = number * (amount.requests or samples // settings.rounds_a_point)
        traits = Traits(settings.params, arm, first_sample=first, seed=settings.seed + number)
        traffic = await self._load(what, settings.load(load), amount, traits)
        round_ = Round.of(arm, load, number, traffic)
        if not round_.requests.tokens:
            reason = next(iter(round_.errors), "no request was begun in that time (--seconds)")
            raise EngineError(f"{what}: no request succeeded: {reason}")
        if before is not None and (not round_.drafted_at or before.server == "trtllm-dflash"):
            await asyncio.sleep(0 if before.is_live else SETTLE_SECONDS)
            await self._count(round_, before)
        rounds.append(round_)
        self._write()

    async def _load(self, what: str, load: Load, amount: Amount, traits: Traits) -> Traffic:
        def progress(done: int, total: int) -> None:
            self._progress(what, done, total)

        timeout = self.settings.longest_silence
        try:
            return await run_load(self._target, self.dataset, load, amount, traits, progress, timeout)
        except EngineError as error:
            raise EngineError(f"{what}: {error}") from None

    async def _count(self, round_: Round, before: Reading) -> None:
        """Takes what the server has counted since; where replies told acceptance, it may have become silent."""
        try:
            after = await self._target.look(round_.arm)
        except EngineError:
            if not round_.drafted_at:
                raise
            return
        assert after is not None
        _count(round_, before, after)

    def _write(self) -> None:
        self.results.count(self.settings.at if self.results.complete else ())
        self.results.write(self._folder)

    # -- the largest load that meets a target ----------------------------------------------------------------------

    async def _search(self, arm: Arm) -> Limit:
        settings = self.settings

        async def meets(load: float) -> bool:
            for number in range(settings.rounds_a_point):
                await self._round(arm, load, number)
            point = summarize(self.results.rounds_of(arm, load), self.results.gpus, self.results.categories)
            return meets_target(point, settings)

        if settings.max_rate is not None:
            largest = settings.max_rate
            found = await search_real(meets, largest * _SMALLEST_RATE, largest, _RATE_TOLERANCE)
        else:
            found = await search_integer(meets, settings.largest_concurrency)
        return Limit(arm=arm, load=found[0], missed=found[1])

    def _keep_limit(self, limit: Limit) -> None:
        self.results.limits = [kept for kept in self.results.limits if kept.arm != limit.arm] + [limit]


def _count(round_: Round, before: Reading, after: Reading) -> None:
    """Keeps a server's counts of drafts in a round, or, where it counts none, its average acceptance length.

    Replies that tell positions tell all but ranks, and how deep a tree is: they count its nodes.
    """
    drafts = after.since(before)
    if drafts is not None:
        round_.accepted_by_rank = drafts.ranks()
        deepest = len(drafts.by_position()[0]) or None
        round_.drafted_at, round_.accepted_at = round_.drafted_at[:deepest], round_.accepted_at[:deepest]
    if round_.drafted_at:
        return
    if drafts is None:
        round_.mean_length = after.mean_length
    elif drafts.steps:
        round_.counted = Counted(steps=drafts.steps, drafted=drafts.drafted, accepted=drafts.accepted)
        round_.drafted_at, round_.accepted_at = drafts.by_position()
    if round_.counted is not None or round_.mean_length is not None:
        round_.metrics = f"{after.server}: {after.url}"


def meets_target(point: Point, settings: SweepSettings) -> bool:
    """Whether a point keeps what `--slo-tps` and `--slo-ttft-ms` ask, without an error."""
    if point.errors or point.ttft is None:
        return False
    percentile = settings.slo_percentile
    # Replies of one token have no speed.
    fast = settings.slo_tps is None or (point.tpot is not None and point.tpot.at(percentile) * settings.slo_tps <= 1)
    return fast and (settings.slo_ttft_ms is None or point.ttft.at(percentile) * 1e3 <= settings.slo_ttft_ms)


async def search_integer(meets: Callable[[float], Awaitable[bool]], most: int) -> tuple[float | None, float | None]:
    """Finds the largest of 1 to `most` that meets, and the next one, which does not; None where there is none."""
    good, bad = 0, most + 1
    probe = 1
    while bad - good > 1:
        if await meets(float(probe)):
            good = probe
        else:
            bad = probe
        probe = min(2 * good, most) if bad > most else (good + bad) // 2  # doubling until one does not
    return float(good) if good else None, float(bad) if bad <= most else None


async def search_real(
    meets: Callable[[float], Awaitable[bool]], least: float, most: float, tolerance: float
) -> tuple[float | None, float | None]:
    """Finds the largest real number that meets, and one that does not, no more than a factor `tolerance` apart."""
    if await meets(most):
        return most, None
    if not await meets(least):
        return None, least
    good, bad = least, most
    while bad / good > tolerance:
        middle = float(f"{(good * bad) ** 0.5:.4g}")
        if await meets(middle):
            good = middle
        else:
            bad = middle
    return good, bad


def imposed_curve(acceptance: ImposedAcceptance) -> dict[str, float]:
    """Describes an imposed acceptance for `Results`."""
    return {"tokens_per_step": acceptance.tokens, "rows": acceptance.block, "survival": acceptance.survival}
