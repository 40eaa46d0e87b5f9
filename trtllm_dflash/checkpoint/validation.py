"""Errors of a configuration, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from trtllm_dflash.errors import CheckpointError


def first_problem(error: ValidationError) -> str:
    """Formats the first problem of a validation error: `field: what is wrong`."""
    problem = error.errors()[0]
    field = ".".join(str(step) for step in problem["loc"])
    message = " ".join(problem["msg"].split())
    return f"{field}: {message}" if field else message


@contextmanager
def reading_config(folder: Path) -> Iterator[None]:
    """Turns any error from reading a folder's config.json into a CheckpointError that names the folder."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{folder}: config.json: {first_problem(error)}") from None
    # A list where an object should be, a word or NaN where a number should, and the like.
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: config.json: a setting is of the wrong type ({error})") from None
