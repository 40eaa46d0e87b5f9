"""The known pairs, a YAML file each in `build_configs/`, for `build --model NAME`."""

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator
from typing_extensions import Self

from trtllm_dflash.checkpoint.validation import first_problem
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import FAMILIES
from trtllm_dflash.models.weights import Precision

#: libyaml where PyYAML was built with it, as its wheels are: it reads the same, in a sixth of the time.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: How a drafter drafts.
DrafterKind = Literal["dflash", "dflash2", "dspark"]


class BuildOverrides(BaseModel):
    """Build settings that differ from the defaults for one pair."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Precision | None = None
    max_batch: PositiveInt | None = None
    max_seq_len: PositiveInt | None = None  # tokens
    chunk: PositiveInt | None = None  # tokens of a prefill chunk


class ServingLimits(BaseModel):
    """Slots and their length that a pair is served with on a GPU that has room for them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch: PositiveInt
    max_seq_len: PositiveInt  # tokens


class PairFacts(BaseModel):
    """A catalog entry's facts on its checkpoints; None where it does not give one.

    Attributes:
        deduced: the drafter's config.json is behind a gate, and what is said of it here was deduced from its size and
            from its publisher's other drafters. Builds go by what the file says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int
    target_layers: int
    drafter_layers: int
    kind: DrafterKind = "dflash"
    tap_layers: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    deduced: bool = False


class CatalogEntry(BaseModel):
    """A target, its drafter, and the settings to build and serve them with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: str  # `model_type` in the target's config.json
    target: str  # Hugging Face repository, or `package:` folder
    drafter: str
    kind: DrafterKind = "dflash"
    block_size: PositiveInt  # the drafter's rows
    target_layers: PositiveInt
    tap_layers: tuple[NonNegativeInt, ...] | None = None  # None: not known here, read from the checkpoint
    mask_token_id: NonNegativeInt | None = None  # likewise
    drafter_layers: PositiveInt
    deduced: bool = False  # likewise, of the drafter: see `PairFacts`
    chat: dict[str, bool | int | str] = Field(default_factory=dict)  # arguments of the chat template
    notes: list[str] = Field(default_factory=list)
    limits: ServingLimits | None = None
    build: BuildOverrides = BuildOverrides()

    def build_values(self) -> dict[str, Any]:
        """Makes the settings of `build` for this pair; others keep their defaults."""
        values: dict[str, Any] = {"name": self.name, "target": self.target, "drafter": self.drafter}
        values |= {"facts": self.facts, "limits": self.limits}
        if self.chat:
            values["chat_arguments"] = dict(self.chat)
        return values | self.build.model_dump(exclude_none=True)

    @property
    def facts(self) -> PairFacts:
        """The entry's facts on its checkpoints."""
        return PairFacts(**self.model_dump(include=set(PairFacts.model_fields)))

    @property
    def buildable(self) -> bool:
        """Whether we compute the target's family."""
        return self.family in FAMILIES

    @model_validator(mode="after")
    def _taps_are_in_the_target(self) -> Self:
        if self.tap_layers and max(self.tap_layers) >= self.target_layers:
            raise ValueError(f"tap layer {max(self.tap_layers)} is outside the {self.target_layers} target_layers")
        return self


def load_catalog(folder: Path | None = None) -> dict[str, CatalogEntry]:
    """Reads every known pair, by name and in order of names, from `folder` or this installation's build_configs.

    Raises:
        SettingsError: a file is not valid; names the file and the field.
    """
    return dict(_installed()) if folder is None else _read_folder(folder)


@cache  # a command asks several times
def _installed() -> dict[str, CatalogEntry]:
    return _read_folder(_folder())


def _read_folder(folder: Path) -> dict[str, CatalogEntry]:
    files = sorted(folder.glob("*.yaml"), key=lambda file: file.stem)
    return {file.stem: _read_entry(file) for file in files}


def find_entry(name: str) -> CatalogEntry:
    """Finds the pair of that name, the first whose target has it at Hugging Face, or the one in a file (`.yaml`).

    Raises:
        SettingsError: there is none, and suggests the closest names; or the file is not valid.
    """
    if name.endswith(".yaml"):
        return _read_entry(Path(name))
    catalog = load_catalog()
    if name in catalog:
        return catalog[name]
    targets: dict[str, CatalogEntry] = {}
    for entry in catalog.values():  # a target's first pair is the one with its DFlash drafter
        targets.setdefault(entry.target.lower(), entry)
    if name.lower() in targets:  # a repository's name has no case
        return targets[name.lower()]
    spelled = {known.lower(): known for known in (*catalog, *(entry.target for entry in targets.values()))}
    close = [spelled[match] for match in get_close_matches(name.lower(), spelled, cutoff=0.5)]
    suggestion = f"did you mean {' or '.join(close)}? " if close else ""
    raise SettingsError(f"unknown model {name!r}: {suggestion}`trtllm-dflash models` lists them all")


def find_entry_or_target(model: str) -> CatalogEntry | None:
    """Finds the pair that a model's name means; None where it is a checkpoint of no known pair: a target.

    Raises:
        SettingsError: it is neither; or it is a known drafter.
    """
    catalog = load_catalog()
    if model in catalog or model.endswith(".yaml") or not ("/" in model or Path(model).is_dir()):
        return find_entry(model)
    for entry in catalog.values():
        if model.lower() == entry.target.lower():
            return entry
        if model.lower() == entry.drafter.lower():
            raise SettingsError(f"{model} is the drafter of {entry.name}; name that, or its target {entry.target}")
    return None


def chat_arguments_of(target: str) -> dict[str, Any]:
    """Looks up the chat template's arguments that a known target's drafter needs; none for an unknown target."""
    return next((dict(entry.chat) for entry in load_catalog().values() if entry.target == target), {})


def _folder() -> Path:
    """Finds the files: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parent
    for parent in (package, package.parent):
        if (parent / "build_configs").is_dir():
            return parent / "build_configs"
    raise SettingsError(f"no build_configs folder in {package} or beside it; install trtllm-dflash again")


def _read_entry(file: Path) -> CatalogEntry:
    try:
        entry = CatalogEntry.model_validate(yaml.load(file.read_text(encoding="utf-8"), _LOADER))
    except ValidationError as error:
        raise SettingsError(f"{file}: {first_problem(error)}") from None
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # days that no month has, say
        raise SettingsError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from None
    if entry.name != file.stem:
        raise SettingsError(f"{file}: name: {entry.name!r} differs from the file's name")
    return entry
