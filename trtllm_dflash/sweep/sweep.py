"""`sweep`: throughput at every load, or the largest load that meets a target, of one arm or of several by turns."""

import asyncio
import re
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationInfo

from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.bench.step import Numbers
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.runtime.request import MaxTokens, SamplingParams, Temperature, TopK, TopP
from trtllm_dflash.session.choice import Kernels
from trtllm_dflash.sweep.dataset import Dataset
from trtllm_dflash.sweep.load import Amount, Arm, ClosedLoop, Load, OpenLoop, Target, Traits, run_load
from trtllm_dflash.sweep.results import FILE, Limit, Results, read_results
from trtllm_dflash.sweep.runtime_metrics import SETTLE_SECONDS, Reading
from trtllm_dflash.sweep.summary import Counted, Point, Round, summarize

#: Told what is measured, how much of that is done, and of how much.
Progress = Callable[[str, int, int], None]

_CONCURRENCY = (1, 2, 4, 8)
_LEAST_REQUESTS, _REQUESTS_PER_CLIENT = 32, 8
_RATE_TOLERANCE = 1.05  # between the largest rate that meets a target and the smallest that does not
_SMALLEST_RATE = 1 / 64  # of the largest
_ARM = re.compile(r"[A-Za-z0-9][\w.+-]*")
_SERVER = re.compile(r"https?://[^\s/]+(/\S*)?|(grpc://)?[^\s/=]+:\d+")


def positive_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Numbers from "100,200.5", each once and in order.

    Raises:
        SettingsError: that is not what the text holds; names the flag.
    """
    try:
        numbers = {float(part) for part in text.split(",")}
    except ValueError:
        numbers = {0.0}
    if not all(0 < number < float("inf") for number in numbers):
        raise SettingsError(f"--{flag} {text}: write positive numbers, such as 100,200")
    return tuple(sorted(numbers))


def _reals(value: Any, info: ValidationInfo) -> Any:
    return positive_numbers(str(info.field_name), value) if isinstance(value, str) else value


def _arms(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    arms: dict[str, str | None] = {}
    for part in parts:
        name, equals, server = part.partition("=")
        good = _ARM.fullmatch(name) and _SERVER.fullmatch(server) if equals else name in ("plain", "draft")
        if not good:
            forms = "write plain,draft, or one of them; or servers: NAME=http://HOST:PORT,NAME=HOST:PORT"
            raise SettingsError(f"--compare {value}: {forms}")
        arms[name] = server or None
    if len(arms) != len(parts):
        raise SettingsError(f"--compare {value}: give each arm once, under a name of its own")
    if None in arms.values() and any(arms.values()):
        raise SettingsError(
            f"--compare {value}: plain and draft are asked of --url; name a server for each, or for none"
        )
    return arms


def _by_arm(text: str) -> dict[str, str] | None:
    """Of "NAME=VALUE,NAME=VALUE"; None of one value."""
    parts = [part.strip().partition("=") for part in text.split(",")]
    named = all(equals and _ARM.fullmatch(name) for name, equals, _ in parts)
    return {name: value for name, _, value in parts} if named else None


Reals = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_reals)]
Arms = Annotated[dict[str, str | None], BeforeValidator(_arms)]  # each with its server, if it has one of its own


class SweepSettings(BaseModel):
    """What `sweep` is asked for; each field is a flag. What is not said is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # What is measured.
    url: str | None = None
    engine: Path | None = None
    shape: str | None = None
    model: str | None = None
    tokenizer: Path | None = None
    compare: Arms | None = None
    metrics_url: str | None = None
    gpus: PositiveInt | None = None
    label: str | None = None

    # An engine in this process.
    device: str = "auto"
    kernels: Kernels | None = None
    draft_length: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] | None = None
    tp: PositiveInt | None = None
    layers: PositiveInt | None = None
    drafter_precision: Literal["fp8"] | None = None
    draft_vocab: PositiveInt | None = None
    prompt_tokens: PositiveInt | None = None
    simulate_acceptance: float | None = None

    # The load.
    concurrency: Numbers | None = None
    rate: Reals | None = None
    arrival: Literal["poisson", "constant"] | None = None
    requests: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    warmup: Annotated[int, Field(ge=0)] | None = None
    rounds: PositiveInt | None = None

    # The requests.
    dataset: tuple[Path, ...] = ()
    output_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    # What is read from it.
    at: Reals = ()
    slo_tps: PositiveFloat | None = None
    slo_ttft_ms: PositiveFloat | None = None
    slo_percentile: Literal[50, 90, 99] = 50
    max_concurrency: PositiveInt | None = None
    max_rate: PositiveFloat | None = None

    @property
    def arms(self) -> tuple[Arm, ...]:
        """In the order of the first turn."""
        return tuple(self.compare or ("served",))

    @property
    def servers(self) -> dict[Arm, str]:
        """URLs by arm, where arms are servers; else none."""
        return {arm: url for arm, url in (self.compare or {}).items() if url is not None}

    def of_arm(self, flag: Literal["model", "metrics_url"], arm: Arm) -> str | None:
        """What a flag says for an arm: NAME=VALUE,..., or one value for all."""
        value: str | None = getattr(self, flag)
        named = _by_arm(value) if value is not None and self.servers else None
        return value if named is None else named.get(arm)

    @property
    def params(self) -> SamplingParams:
        """Of every request."""
        return SamplingParams(
            max_tokens=self.output_tokens or self.max_tokens or 256,
            ignore_eos=self.output_tokens is not None,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )

    @property
    def searches(self) -> bool:
        """Whether a load is searched for, instead of a grid of loads being measured."""
        return self.slo_tps is not None or self.slo_ttft_ms is not None

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive at a rate."""
        return self.rate is not None or self.max_rate is not None

    @property
    def largest_concurrency(self) -> int:
        """Of the loads that may be measured in a closed loop."""
        return (self.max_concurrency or 256) if self.searches else max(self.concurrency or _CONCURRENCY)

    @property
    def rounds_a_point(self) -> int:
        """Two where arms take turns: the second time in the other order, so that drift is no arm's advantage."""
        return self.rounds or (2 if len(self.arms) > 1 else 1)

    def load(self, value: float) -> Load:
        """The load of this many clients, or of this rate."""
        return OpenLoop(value, self.arrival or "poisson") if self.open_loop else ClosedLoop(int(value))

    def grid(self) -> list[float]:
        """The loads to measure, in order."""
        return list(self.rate) if self.rate is not None else [float(n) for n in self.concurrency or _CONCURRENCY]

    def amount(self, value: float) -> Amount:
        """Of one round under a load."""
        if self.seconds is not None:
            return Amount(seconds=self.seconds / self.rounds_a_point)
        clients = 1 if self.open_loop else int(value)
        whole = self.requests or max(_LEAST_REQUESTS, _REQUESTS_PER_CLIENT * clients)
        return Amount(requests=max(clients, -(-whole // self.rounds_a_point)))  # fewer would not keep the clients busy


def check_settings(settings: SweepSettings) -> None:
    """Refuses settings that contradict one another.

    Raises:
        SettingsError: names the flags.
    """
    # Results and reports name the servers, and are made to be shown to others. The address itself is not repeated here.
    for flag, addresses in (
        ("url", settings.url),
        ("metrics-url", settings.metrics_url),
        ("compare", settings.servers),
    ):
        if "@" in str(addresses or ""):
            raise SettingsError(f"--{flag}: give no user and password in an address; --api-key-file takes a key")
    given = [name for name in ("url", "engine", "shape") if getattr(settings, name) is not None]
    if settings.servers:
        if given:
            raise SettingsError(f"--{given[0]} and --compare NAME=URL: the servers are named already; leave one out")
        given = ["compare"]
        _check_named(settings)
    if len(given) != 1:
        raise SettingsError("give one of --url (a server), --engine DIR and --shape NAME (both in this process)")
    needs: dict[str, tuple[str, ...]] = {
        "model": ("url", "compare"),
        "tokenizer": ("url", "compare"),
        "metrics_url": ("url", "compare"),
        "kernels": ("engine", "shape"),
        "precision": ("shape",),
        "tp": ("shape",),
        "layers": ("shape",),
        "drafter_precision": ("shape",),
        "draft_vocab": ("shape",),
        "prompt_tokens": ("engine", "shape"),
        "simulate_acceptance": ("engine", "shape"),
    }
    for name, goes_with in needs.items():
        if getattr(settings, name) is not None and given[0] not in goes_with:
            flags = " or ".join(f"--{kind}" for kind in goes_with)
            raise SettingsError(f"--{name.replace('_', '-')} goes with {flags}, not with --{given[0]}")
    exclusive = [
        ("concurrency", "rate"),
        ("requests", "seconds"),
        ("output_tokens", "max_tokens"),
        ("max_concurrency", "max_rate"),
        ("dataset", "prompt_tokens"),
    ]
    for one, other in exclusive:
        if getattr(settings, one) and getattr(settings, other):
            raise SettingsError(f"--{one.replace('_', '-')} and --{other.replace('_', '-')}: give one of them")
    if settings.searches:
        for name in ("concurrency", "rate", "at"):
            if getattr(settings, name):
                raise SettingsError(f"--{name}: with --slo-tps or --slo-ttft-ms the load is searched for; leave it out")
    elif settings.max_concurrency or settings.max_rate:
        raise SettingsError("--max-concurrency and --max-rate bound a search: give --slo-tps or --slo-ttft-ms, too")
    if settings.arrival is not None and not settings.open_loop:
        raise SettingsError("--arrival goes with --rate")
    if settings.shape is not None and (settings.dataset or settings.max_tokens):
        raise SettingsError("--shape: random weights know no text and no end; give --prompt-tokens and --output-tokens")


def _check_named(settings: SweepSettings) -> None:
    arms = settings.servers
    for flag, value in (("model", settings.model), ("metrics-url", settings.metrics_url)):
        named = _by_arm(value) if value is not None else None
        if flag == "metrics-url" and value is not None and named is None:
            raise SettingsError(f"--metrics-url {value}: say whose: NAME=URL,NAME=URL of {', '.join(arms)}")
        for name in named or ():
            if name not in arms:
                raise SettingsError(f"--{flag} {name}=: --compare has no {name}, but {', '.join(arms)}")


def plan_results(settings: SweepSettings, dataset: Dataset, **about: Any) -> Results:
    """Results without rounds yet.

    Args:
        about: further fields of `Results`: engine, gpus, imposed_acceptance, machine.
    """
    params = settings.params
    asked: dict[str, Any] = {
        "target": _target_name(settings),
        "arms": list(settings.arms),
        "arrival": (settings.arrival or "poisson") if settings.open_loop else None,
        "requests": settings.requests,
        "seconds": settings.seconds,
        "warmup": settings.warmup,
        "rounds": settings.rounds_a_point,
        "sampling": params.model_dump(include={"temperature", "top_k", "top_p", "seed"}),
        "output_tokens" if params.ignore_eos else "max_tokens": params.max_tokens,
    }
    warnings = []
    if dataset.random_tokens:
        warnings.append("the prompts are random tokens: no figure here says what text would give")
    about.setdefault("machine", machine())
    target = {"percentile": float(settings.slo_percentile)}
    target |= {"tokens_per_second_per_user": settings.slo_tps} if settings.slo_tps else {}
    target |= {"ttft_seconds": settings.slo_ttft_ms / 1e3} if settings.slo_ttft_ms else {}
    return Results(
        label=settings.label or (", ".join(settings.servers) or asked["target"]),
        versions=versions(),
        command=tidy_command(sys.argv[1:]),
        dataset={"name": dataset.name, "samples": len(dataset.samples), "sha256": dataset.digest},
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
    """A command as it may be shown: of whole paths only the last part, no key."""
    shown = []
    for argument in arguments:
        flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        shown.append(flag + equals + (Path(value).name if Path(value).is_absolute() else value))
    return shlex.join(["trtllm-dflash", *shown])


def open_results(fresh: Results, folder: Path, resume: bool, force: bool) -> Results:
    """The results to go on with: fresh ones, or those of the folder.

    Raises:
        SettingsError: the folder has some, and it was not said what to do with them; or they were asked otherwise.
    """
    if not (folder / FILE).exists() or force:
        if resume and not force:
            raise SettingsError(f"--resume: there is no {FILE} in {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        return fresh
    if not resume:
        raise SettingsError(f"--output {folder}: has results; give --resume to go on, --force to begin anew")
    kept = read_results(folder)
    same = {"dataset": fresh.dataset, "load_unit": fresh.load_unit, "gpus": fresh.gpus, **fresh.asked}
    same["imposed_acceptance"] = fresh.imposed_acceptance
    before = {"dataset": kept.dataset, "load_unit": kept.load_unit, "gpus": kept.gpus, **kept.asked}
    before["imposed_acceptance"] = kept.imposed_acceptance
    for name in same.keys() | before.keys():
        if same.get(name) != before.get(name):
            raise SettingsError(f"--resume: {name} was {before.get(name)}, and is {same.get(name)} now")
    return fresh.model_copy(update={"rounds": kept.rounds})


class Sweep:
    """Measures a target; `results` fill, and are written, round by round.

    Args:
        results: fresh ones, or those to go on with: their rounds are not measured again.
        folder: where they are written.
        progress: told of the sweep, and of the round that runs.
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
            EngineError: nothing but errors came of a round.
            DFlashError: the target is not there, or cannot be asked in this way.
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
            await run_load(
                self._target,
                self.dataset,
                clients,
                Amount(requests=warmup),
                traits,
                lambda done, total: self._progress(f"{what}: warming up", done, total),
            )
        before = await self._target.look(arm)
        if before is not None:  # what the warm-up drafted is in it only later
            await asyncio.sleep(SETTLE_SECONDS)
            before = await self._target.look(arm)
        first = number * (amount.requests or samples // settings.rounds_a_point)
        traits = Traits(settings.params, arm, first_sample=first, seed=settings.seed + number)
        traffic = await run_load(
            self._target,
            self.dataset,
            settings.load(load),
            amount,
            traits,
            lambda done, total: self._progress(what, done, total),
        )
        round_ = Round.of(arm, load, number, traffic)
        if not round_.requests.tokens:
            reason = next(iter(round_.errors), "no request was begun in that time (--seconds)")
            raise EngineError(f"{what}: no request succeeded: {reason}")
        if before is not None and not round_.drafted_at:
            await asyncio.sleep(SETTLE_SECONDS)
            after = await self._target.look(arm)
            assert after is not None
            _count(round_, before, after)
        rounds.append(round_)
        self._write()

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
    """Keeps what a server counted in a round, or, where it counts nothing, what it averages."""
    drafts = after.since(before)
    if drafts is None:
        round_.mean_length = after.mean_length
    elif drafts.steps:
        round_.counted = Counted(steps=drafts.steps, drafted=drafts.drafted, accepted=drafts.accepted)
        round_.drafted_at, round_.accepted_at = drafts.by_position()
    if round_.counted is not None or round_.mean_length is not None:
        round_.metrics = f"{after.server}: {after.url}"


def meets_target(point: Point, settings: SweepSettings) -> bool:
    """Whether a point keeps what `--slo-tps` and `--slo-ttft-ms` ask, without an error."""
    if point.errors or point.ttft is None or point.tpot is None:
        return False
    percentile = settings.slo_percentile
    fast = settings.slo_tps is None or point.tpot.at(percentile) * settings.slo_tps <= 1
    return fast and (settings.slo_ttft_ms is None or point.ttft.at(percentile) * 1e3 <= settings.slo_ttft_ms)


async def search_integer(meets: Callable[[float], Awaitable[bool]], most: int) -> tuple[float | None, float | None]:
    """The largest of 1 to `most` that meets, and the next one, which does not; None where there is no such."""
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
    """Likewise of real numbers, until the two differ by no more than a factor."""
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
    """For `Results`."""
    return {"tokens_per_step": acceptance.tokens, "rows": acceptance.block, "survival": acceptance.survival}
