"""The package's optional parts (pip's extras), and the command that adds one to this installation."""

import json
import shlex
from functools import lru_cache
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_PACKAGE = "trtllm-dflash"


def pip_install(extra: str) -> str:
    """Writes the command that installs an extra: from where this package was installed, an index only if it was one."""
    place, is_editable = _source()
    return f"pip install {'-e ' * is_editable}{shlex.quote(f'{place}[{extra}]')}"


@lru_cache(maxsize=1)
def _source() -> tuple[str, bool]:
    """Finds the folder or file that the package was installed from, else its name (PEP 610); and whether editable."""
    try:
        said: dict[str, Any] = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return _PACKAGE, False
    url = urlsplit(said.get("url", ""))
    if url.scheme != "file":
        return _PACKAGE, False
    return url2pathname(url.path), bool(said.get("dir_info", {}).get("editable"))
