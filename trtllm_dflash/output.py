"""The folder at `--output`: its errors, and whose it is."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_dflash.errors import SettingsError


@contextmanager
def writing(folder: Path, flag: str = "--output") -> Iterator[None]:
    """Turns an error of the file system into one that names the folder, or the file, and its flag.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{flag} {folder}: cannot be written ({error.strerror or error})") from None


def check_writable(file: Path, flag: str) -> None:
    """Checks, before what takes long, that a file may be written or made.

    Raises:
        SettingsError: its folder is missing, or it may not be.
    """
    if not file.absolute().parent.is_dir():
        raise SettingsError(f"{flag} {file}: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise SettingsError(f"{flag} {file}: cannot be written ({os.strerror(errno.EACCES)})")


@contextmanager
def held(folder: Path, whose: str) -> Iterator[None]:
    """Keeps a folder from other processes that hold it, until this one is done or ends.

    Args:
        whose: what another one is called.

    Raises:
        SettingsError: another one holds it, or it is no folder.
    """
    with writing(folder):
        opened = os.open(folder, os.O_RDONLY)
    try:
        lock(opened, f"--output {folder}: another {whose} is using it")
        yield
    finally:
        os.close(opened)


def lock(opened: int, refusal: str) -> None:
    """Keeps an open file or folder from other processes that lock it, until it is closed.

    Raises:
        SettingsError: another one has; it says `refusal`.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(refusal) from None
    except OSError:  # a file system without locks: there nobody is kept from it
        pass
