"""Errors of the folder at `--output`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_dflash.errors import SettingsError


@contextmanager
def writing(folder: Path, flag: str = "--output") -> Iterator[None]:
    """Turn an error of the file system into one that names the folder, or the file, and its flag.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{flag} {folder}: cannot be written ({error.strerror})") from None
