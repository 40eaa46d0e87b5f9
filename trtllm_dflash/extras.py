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
    said = _source()
    url, named = str(said.get("url", "")), f"{_PACKAGE}[{extra}]"
    vcs, folder = said.get("vcs_info"), said.get("dir_info")
    if url.startswith("file:"):
        place = url2pathname(urlsplit(url).path)
        is_editable = isinstance(folder, dict) and bool(folder.get("editable"))
        return f"pip install {'-e ' * is_editable}{shlex.quote(f'{place}[{extra}]')}"
    if isinstance(vcs, dict):
        url = f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return f"pip install {shlex.quote(f'{named} @ {url}' if url else named)}"


@lru_cache(maxsize=1)
def _source() -> dict[str, Any]:
    """Reads where the package was installed from (PEP 610); nothing of an index, or of what has no such record."""
    try:
        said = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
