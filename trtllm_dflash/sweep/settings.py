"""Settings of a sweep: arms, loads, targets, prompts."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationInfo

from trtllm_dflash.bench.step import Numbers
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.runtime.draft_length import DraftLengthChoice
from trtllm_dflash.runtime.request import MaxTokens, SamplingParams, Temperature, TopK, TopP
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.trees import DraftTreeChoice
from trtllm_dflash.sweep.load import Amount, Arm, ClosedLoop, Load, OpenLoop

_CONCURRENCY = (1, 2, 4, 8)
_TIMEOUT = 600.0
_LEAST_REQUESTS, _REQUESTS_PER_CLIENT = 32, 8
_ARM = re.compile(r"[A-Za-z0-9][\w.+-]*")
_SERVER = re.compile(r"https?://[^\s/]+(/\S*)?|(grpc://)?[^\s/=]+:\d+")


def positive_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Parses "100,200.5" into numbers, each once and in order.

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
    """Parses "NAME=VALUE,NAME=VALUE"; None for one value."""
    parts = [part.strip().partition("=") for part in text.split(",")]
    named = all(equals and _ARM.fullmatch(name) for name, equals, _ in parts)
    return {name: value for name, _, value in parts} if named else None


Reals = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_reals)]
Arms = Annotated[dict[str, str | None], BeforeValidator(_arms)]  # each with its server, if it has one of its own


class SweepSettings(BaseModel):
    """Settings of `sweep`; each field is a flag, None where it was not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # The server or engine to measure.
    url: str | None = None
    engine: Path | None = None
    shape: str | None = None
    model: str | None = None
    tokenizer: Path | None = None
    compare: Arms | None = None
    metrics_url: str | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = None
    gpus: PositiveInt | None = None
    label: str | None = None

    # An engine in this process.
    device: str | None = None
    kernels: Kernels | None = None
    draft_length: DraftLengthChoice | None = None
    draft_tree: DraftTreeChoice | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8-blocks"] | None = None
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
    ramp: PositiveFloat | None = None
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

    # The figures to read from it.
    at: Reals = ()
    slo_tps: PositiveFloat | None = None
    slo_ttft_ms: PositiveFloat | None = None
    slo_percentile: Literal[50, 90, 99] = 50
    max_concurrency: PositiveInt | None = None
    max_rate: PositiveFloat | None = None

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms, in the order of the first turn."""
        return tuple(self.compare or ("served",))

    @property
    def servers(self) -> dict[Arm, str]:
        """URLs by arm, where arms are servers; else none."""
        return {arm: url for arm, url in (self.compare or {}).items() if url is not None}

    def of_arm(self, flag: Literal["model", "metrics_url"], arm: Arm) -> str | None:
        """Looks up a flag's value for an arm: NAME=VALUE,..., or one value for all."""
        value: str | None = getattr(self, flag)
        named = _by_arm(value) if value is not None and self.servers else None
        return value if named is None else named.get(arm)

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of every request."""
        return SamplingParams(
            max_tokens=self.output_tokens or self.max_tokens or 256,
            ignore_eos=self.output_tokens is not None,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )

    @property
    def longest_silence(self) -> float:
        """Seconds in which a server may send nothing; an engine in this process tells its errors itself."""
        return math.inf if self.engine or self.shape else self.timeout or _TIMEOUT

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
        """The largest number of clients that may be measured in a closed loop."""
        return (self.max_concurrency or 256) if self.searches else max(self.concurrency or _CONCURRENCY)

    @property
    def rounds_a_point(self) -> int:
        """Rounds of each point: two where arms take turns, the second in reverse order, so that drift favours none."""
        return self.rounds or (2 if len(self.arms) > 1 else 1)

    def load(self, value: float) -> Load:
        """Makes the load of this many clients, or of this rate."""
        if self.open_loop:
            return OpenLoop(value, self.arrival or "poisson")
        return ClosedLoop(int(value), self.ramp or 0.0)

    def grid(self) -> list[float]:
        """Lists the loads to measure, in order."""
        return list(self.rate) if self.rate is not None else [float(n) for n in self.concurrency or _CONCURRENCY]

    def amount(self, value: float) -> Amount:
        """Chooses the length of one round under a load."""
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
    if settings.url is not None and not _SERVER.fullmatch(settings.url):
        raise SettingsError(f"--url {settings.url}: write HOST:PORT of Triton's gRPC, or http://HOST:PORT of an API")
    needs: dict[str, tuple[str, ...]] = {
        "model": ("url", "compare"),
        "tokenizer": ("url", "compare"),
        "metrics_url": ("url", "compare"),
        "timeout": ("url", "compare"),
        "device": ("engine", "shape"),
        "kernels": ("engine", "shape"),
        "draft_length": ("engine", "shape"),
        "draft_tree": ("engine", "shape"),
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
    elif "slo_percentile" in settings.model_fields_set:
        raise SettingsError("--slo-percentile: of what; give --slo-tps or --slo-ttft-ms, too")
    for name in ("top_k", "top_p"):
        if name in settings.model_fields_set and "temperature" not in settings.model_fields_set:
            raise SettingsError(f"--{name.replace('_', '-')}: without --temperature replies are greedy; give both")
    if settings.arrival is not None and not settings.open_loop:
        raise SettingsError("--arrival goes with --rate")
    if settings.ramp is not None and (settings.open_loop or settings.seconds is None):
        raise SettingsError("--ramp: clients begin before the seconds that count; give --seconds, and no --rate")
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
