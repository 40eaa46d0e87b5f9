"""Objects of any fields that requests carry, schemas say, and that are written as JSON again."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses numbers that are none of JSON: parsers take NaN, and 1e999 for infinite."""
    if any(isinstance(one, float) and not math.isfinite(one) for one in _values_in(value)):
        raise PydanticCustomError("finite_number", "NaN and infinite numbers are no JSON")
    return value


def _values_in(value: object) -> list[object]:
    """Lists a value and all in it."""
    found = [value]
    for one in found:  # which grows
        if isinstance(one, Mapping):
            found += one.values()
        elif isinstance(one, list):
            found += one
    return found


JsonFields = Annotated[dict[str, Any], AfterValidator(_finite)]
