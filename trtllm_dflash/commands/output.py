"""Errors of the folder at `--output`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_dflash.errors import SettingsError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into one that names the folder.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise SettingsError(f"--output {folder}: cannot be written ({error.strerror})") from None
