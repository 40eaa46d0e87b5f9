"""The key of an OpenAI API: from a file, or from the environment; never from the command line, which others can see."""

import os
from pathlib import Path

from trtllm_dflash.errors import SettingsError, why_unreadable

VARIABLE = "TRTLLM_DFLASH_API_KEY"


def read_api_key(file: Path | None, flag: str) -> str | None:
    """Reads the key from a file or, without one, from the environment; None where neither has one.

    Args:
        flag: the flag that named the file, for errors.

    Raises:
        SettingsError: the file cannot be read, or is empty, or a header cannot carry the key.
    """
    if file is None:
        key, place = os.environ.get(VARIABLE, ""), VARIABLE
    else:
        place = f"{flag} {file}"
        try:
            key = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{place}: {why_unreadable(error)}") from None
        if not key:
            raise SettingsError(f"{place}: is empty")
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{place}: a key is one line of printable ASCII, which a header can carry")
    return key or None
