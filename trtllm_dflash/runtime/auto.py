"""Settings that are a number of tokens, or auto: what measured step times make best."""

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError


def count_or_auto(setting: str, least: int) -> BeforeValidator:
    """Makes the reader of such a setting, `least` or more, from text too: flags and a deployed model give texts."""

    def read(value: object) -> object:
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if value == "auto" or (type(value) is int and value >= least):
            return value
        raise PydanticCustomError(setting, "choose auto, or a number of tokens")

    return BeforeValidator(read)
