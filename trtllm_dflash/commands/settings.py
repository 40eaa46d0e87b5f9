"""Settings from flags: those that were given, checked by the settings' own class."""

from collections.abc import Collection, Mapping
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


def validated(kind: type[Settings], values: Mapping[str, Any], assigned: Collection[str] = ()) -> Settings:
    """Make a settings object of flags; what is wrong is one line that names the flag.

    Args:
        assigned: names whose values `--set` gave.

    Raises:
        SettingsError: a value is of the wrong type, out of range, or unknown.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        flag, equals = (f"--set {name}", "=") if name in assigned else (flag_of(name), " ")
        if len(first["loc"]) > 1 and isinstance(first["loc"][1], int):  # a flag that may be repeated is in the singular
            flag = flag.removesuffix("s")
        if first["type"] == "extra_forbidden":
            known = ", ".join(name for name, field in kind.model_fields.items() if not field.exclude)
            raise SettingsError(f"{flag}: no such setting; there are: {known}") from None
        raise SettingsError(f"{flag}{equals}{first['input']}: {first['msg']}") from None
