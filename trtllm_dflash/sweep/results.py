"""`results.json`: a sweep's settings, machine and figures; with its rounds, so that it can go on."""

import csv
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import Self

from trtllm_dflash.checkpoint.validation import first_problem
from trtllm_dflash.errors import SettingsError, why_unreadable
from trtllm_dflash.sweep.load import Arm
from trtllm_dflash.sweep.pareto import Comparison, Measured, compare, measured
from trtllm_dflash.sweep.summary import PERCENTILES, Point, Round, summarize

SCHEMA_VERSION: Literal[1] = 1
FILE = "results.json"
PARETO, ACCEPTANCE, REPORT, CSV = "pareto.png", "acceptance.png", "report.html", "results.csv"

_SPREADS = ("ttft", "tpot", "itl", "e2e", "late")


class Limit(BaseModel):
    """The largest load that met a target.

    Attributes:
        load: None where not even the smallest one did.
        missed: the smallest load that was measured and missed it; None where the largest allowed one met it.
    """

    arm: Arm
    load: float | None
    missed: float | None


def check_free(folder: Path, names: Iterable[str]) -> None:
    """Refuses a folder that has files of these names: nobody knows whose they are.

    Raises:
        SettingsError: it has one.
    """
    there = next((name for name in names if (folder / name).exists()), None)
    if there is not None:
        raise SettingsError(f"--output {folder}: has a {there}; use another, or --force to replace it")


class Results(BaseModel):
    """The rounds, points and readings of a sweep, with its settings and machine.

    Attributes:
        label: of the sweep, in plots.
        machine: of the load generator; of the engine too where it ran in the same process.
        asked: the settings that decide what is measured; a sweep goes on only under the same ones.
        load_unit: what `load` counts in rounds and points.
        gpus: that the server had; None where it was not said.
        imposed_acceptance: tokens a step that were imposed, not measured.
        categories: of the dataset's samples, in order.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    label: str
    complete: bool = False
    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    engine: dict[str, Any] | None = None
    dataset: dict[str, Any]
    asked: dict[str, Any]
    load_unit: Literal["clients", "requests/s"]
    gpus: int | None
    imposed_acceptance: dict[str, float] | None = None
    warnings: list[str] = []
    points: list[Point] = []
    fixed_speed: list[Comparison] = []
    target: dict[str, float] | None = None
    limits: list[Limit] = []
    categories: list[str] = []
    rounds: list[Round] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {(point.load, point.arm) for point in self.points} != {(round_.load, round_.arm) for round_ in self.rounds}:
            raise ValueError("points: they are not those of the rounds")
        if any(len(point.acceptance_by_position) != len(point.verified_by_position) for point in self.points):
            raise ValueError("points: acceptance_by_position and verified_by_position are not of the same length")
        return self

    @property
    def arms(self) -> list[Arm]:
        """The arms, in the order of measuring."""
        return list(dict.fromkeys(round_.arm for round_ in self.rounds))

    @property
    def reference(self) -> Arm | None:
        """The arm that ratios are taken to: plain decoding, or the last of several arms."""
        return "plain" if "plain" in self.arms else self.arms[-1] if len(self.arms) > 1 else None

    @property
    def device(self) -> str:
        """The device's name, for plots."""
        own = self.machine.get("gpu") or self.machine.get("cpu")
        return str(own) if self.engine is not None else f"load generator on {own}"

    def rounds_of(self, arm: Arm, load: float) -> list[Round]:
        """Finds the rounds of one point."""
        return [round_ for round_ in self.rounds if (round_.arm, round_.load) == (arm, load)]

    def count(self, speeds: tuple[float, ...]) -> None:
        """Counts points and readings anew from the rounds."""
        keys = sorted(
            {(round_.load, round_.arm) for round_ in self.rounds}, key=lambda k: (k[0], self.arms.index(k[1]))
        )
        self.points = [summarize(self.rounds_of(arm, load), self.gpus, self.categories) for load, arm in keys]
        self.fixed_speed = compare(self.measured(), speeds, self.reference) if speeds else []

    def measured(self) -> dict[str, list[Measured]]:
        """Joins the rounds of each point for the frontier, by arm."""
        found: dict[str, list[Measured]] = {}
        for arm in self.arms:
            loads = sorted({round_.load for round_ in self.rounds if round_.arm == arm})
            parts = [measured(self.rounds_of(arm, load), self.load_unit == "clients") for load in loads]
            found[arm] = [part for part in parts if part is not None]
        return found

    def write(self, folder: Path) -> None:
        """Writes results.json; a reader never finds half of it."""
        head = self.model_dump_json(exclude={"rounds", "categories"}, indent=1).removesuffix("\n}")
        rounds = ",\n".join("  " + round_.model_dump_json() for round_ in self.rounds)
        text = f'{head},\n "categories": {json.dumps(self.categories)},\n "rounds": [\n{rounds}\n ]\n}}\n'
        aside = folder / f".{FILE}"
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(folder / FILE)
        except OSError as error:
            with suppress(OSError):
                aside.unlink()
            raise SettingsError(f"{folder / FILE}: cannot be written ({error.strerror})") from None

    def write_csv(self, file: Path) -> None:
        """Writes a CSV file with a line for each point."""
        spreads = [f"{name}_{part}" for name in _SPREADS for part in ("mean", *(f"p{p}" for p in PERCENTILES))]
        plain = [
            name for name in Point.model_fields if name not in (*_SPREADS, "errors", "acceptance_length_by_category")
        ]
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [*plain, "errors", *(f"{name}_seconds" for name in spreads)])
            writer.writeheader()
            for point in self.points:
                row: dict[str, Any] = {name: getattr(point, name) for name in plain}
                row["acceptance_by_position"] = " ".join(f"{share:.4f}" for share in point.acceptance_by_position)
                for name in ("verified_by_position", "accepted_by_rank"):
                    row[name] = " ".join(map(str, getattr(point, name)))
                row["errors"] = sum(point.errors.values())
                for name in spreads:
                    spread = getattr(point, name.rpartition("_")[0])
                    row[f"{name}_seconds"] = None if spread is None else getattr(spread, name.rpartition("_")[2])
                writer.writerow({key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()})


def read_results(place: Path) -> Results:
    """Reads a sweep's results from its folder, or from the file itself.

    Raises:
        SettingsError: there are none, or of another schema version.
    """
    file = place / FILE if place.is_dir() else place
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: {why_unreadable(error)}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file}: cannot be read as a sweep's results: {error}") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise SettingsError(f"{file}: schema version {version}; this version reads {SCHEMA_VERSION}")
    try:
        return Results.model_validate(document)
    except ValidationError as error:
        raise SettingsError(f"{file}: {first_problem(error)}") from None
