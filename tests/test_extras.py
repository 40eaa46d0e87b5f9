"""The command that installs an optional part: from where this package came."""

import json
from importlib import metadata
from types import SimpleNamespace

import pytest

from trtllm_dflash import extras


@pytest.mark.parametrize(
    ("said", "command"),
    [
        (None, "pip install 'trtllm-dflash[tp]'"),
        ("{", "pip install 'trtllm-dflash[tp]'"),
        ("[]", "pip install 'trtllm-dflash[tp]'"),
        ({"url": "https://a.org/x.whl", "archive_info": {}}, "pip install 'trtllm-dflash[tp] @ https://a.org/x.whl'"),
        (
            {"url": "https://a.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "pip install 'trtllm-dflash[tp] @ git+https://a.org/x.git@c0ffee'",
        ),
        ({"url": "file:///a%20b/code", "dir_info": {"editable": True}}, "pip install -e '/a b/code[tp]'"),
        ({"url": "file:///code", "dir_info": {}}, "pip install '/code[tp]'"),
        ({"url": "file:///dist/x-0.1-py3-none-any.whl"}, "pip install '/dist/x-0.1-py3-none-any.whl[tp]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_did(said, command, monkeypatch):
    text = said if said is None or isinstance(said, str) else json.dumps(said)
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    extras._source.cache_clear()
    try:
        assert extras.pip_install("tp") == command
    finally:
        extras._source.cache_clear()
