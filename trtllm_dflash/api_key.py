"""The key of an OpenAI API: from a file, or from the environment; never from the command line, which others can see."""

import os
from pathlib import Path

from trtllm_dflash.errors import SettingsError

VARIABLE = "TRTLLM_DFLASH_API_KEY"


def read_api_key(file: Path | None, flag: str) -> str | None:
    """Reads the key from a file or, without one, from the environment; None where neither has one.

    Args:
        flag: the flag that named the file, for errors.

    Raises:
        SettingsError: the file cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(VARIABLE) or None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{flag} {file}: cannot be read: {error}") from None
    if not key:
        raise SettingsError(f"{flag} {file}: is empty")
    return key
