"""Settings from flags: those that were given, checked by the settings' own class."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trtllm_dflash.errors import SettingsError

Settings = TypeVar("Settings", bound=BaseModel)


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the flags that were given; settings have the defaults of the others."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def flag_of(name: str) -> str:
    """Spell a parameter's name as its flag: `max_batch` is `--max-batch`."""
    return "--" + name.replace("_", "-")


def validated(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Make a settings object of flags; what is wrong is one line that names the flag.

    Raises:
        SettingsError: a value is of the wrong type, out of range, or unknown.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        flag = flag_of(str(first["loc"][0]))
        if len(first["loc"]) > 1 and isinstance(first["loc"][1], int):  # a flag that may be repeated is in the singular
            flag = flag.removesuffix("s")
        if first["type"] == "extra_forbidden":
            known = ", ".join(name for name, field in kind.model_fields.items() if not field.exclude)
            raise SettingsError(f"{flag}: no such setting; there are: {known}") from None
        raise SettingsError(f"{flag} {first['input']}: {first['msg']}") from None
