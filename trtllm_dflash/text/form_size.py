"""The size of a reply's form: a schema, expression or grammar that takes others' time while it is compiled."""

import json
import math
import re
from typing import Any

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.reply.held_schema import LONGEST

#: The field of a request that a form comes from.
FIELD = "structured"

#: Patterns of a schema times its largest `maxLength`: each character of a text that has both takes 20 to 40 us to
#: compile, and nothing ends that.
_MOST_BOUNDED = 30_000
#: A schema's largest `minItems`: every token of such an array takes time with it, for all replies of a step.
_MOST_ITEMS = 1_000
#: The sum of a schema's `multipleOf`s, of those below 1 without their points: it takes some 4 us for each.
_MOST_MULTIPLES = 100_000
_NUMBER = r"\s*:\s*(-?[0-9.eE+-]+)"
_LEAST_ITEMS, _MULTIPLE = re.compile(r'"minItems"' + _NUMBER), re.compile(r'"multipleOf"' + _NUMBER)
_PATTERN = re.compile(r'"pattern"\s*:\s*"')  # the keyword: a property of that name has a schema
_BOUND = re.compile(r'"maxLength"' + _NUMBER)
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def source_of(kind: str, value: Any) -> str:
    """Writes a form as one text; kind and value are those of `Structured`.

    Raises:
        RequestError: it is nested too deeply.
    """
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        raise RequestError(f"{kind}: it is nested too deeply", FIELD) from None


def check_size(kind: str, source: str) -> None:
    """Refuses a form that is too long, or has long texts of patterns, very long arrays or multiples of large numbers.

    Raises:
        RequestError: it is.
    """
    if len(source) > LONGEST:
        raise RequestError(f"has {len(source)} characters; at most {LONGEST} are taken", FIELD)
    written = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), source)
    bounds = [_number(found) for found in _BOUND.findall(written)]
    if bounds and len(_PATTERN.findall(written)) * max(bounds) > _MOST_BOUNDED:
        reason = f"a maxLength of {max(bounds):.0f} is too much beside patterns; their product is at most"
        raise RequestError(f"{kind}: {reason} {_MOST_BOUNDED:,}", FIELD)
    items = max(map(_number, _LEAST_ITEMS.findall(written)), default=0)
    if items > _MOST_ITEMS:
        raise RequestError(f"{kind}: a minItems of {items:.0f} is too much; at most {_MOST_ITEMS:,} are taken", FIELD)
    multiples = sum(map(_digits, _MULTIPLE.findall(written)))
    if multiples > _MOST_MULTIPLES:
        reason = f"a multipleOf of {multiples:.0f} together, without points, is too much"
        raise RequestError(f"{kind}: {reason}; at most {_MOST_MULTIPLES:,} are taken", FIELD)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _digits(text: str) -> float:
    """A number, or the digits of one that has a point, as a number."""
    number = abs(_number(text))
    if number.is_integer() or not math.isfinite(number):
        return number
    digits, _, exponent = repr(number).partition("e")
    return float(digits.replace(".", "").lstrip("0")) if not exponent else number * 10 ** min(300, -int(exponent))
