"""Which tests are repeats: no mark leaves a claim without a case in `make test`."""

import os
import re
import sys

import pytest

from tests.principal_cases import mark_repeats

FAMILIES = """
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt-oss"])
def test_texts_are_equal(family):
    pass
"""


class Marked:
    """Collects as tests/conftest.py does, and keeps what stays in `make test`, or why it is refused."""

    def __init__(self, whole: bool) -> None:
        self.whole, self.staying, self.refusal = whole, set[str](), ""

    def pytest_collection_modifyitems(self, items):
        try:
            mark_repeats(items, self.whole)
        except pytest.UsageError as error:
            self.refusal = str(error)
        self.staying = {item.name for item in items if not item.get_closest_marker("exhaustive")}


@pytest.fixture
def collected(tmp_path, monkeypatch):
    """What is found in a file of such tests."""

    def collect(tests: str, whole: bool = True) -> Marked:
        file, found = tmp_path / "test_claims.py", Marked(whole)
        file.write_text("import pytest\n" + tests)
        monkeypatch.delitem(sys.modules, file.stem, raising=False)  # of a file that stood here before
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        words = ["--collect-only", "--quiet", "--quiet", "-p", "no:cacheprovider", "--import-mode", "importlib"]
        code = pytest.main([*words, "-c", os.devnull, "--rootdir", str(tmp_path), str(file)], plugins=[found])
        assert code == pytest.ExitCode.OK
        return found

    return collect


def test_cases_that_are_not_principal_are_exhaustive(collected):
    found = collected('@pytest.mark.principal("llama", "gpt-oss")' + FAMILIES + "\ndef test_alone():\n    pass\n")
    assert found.refusal == ""
    assert found.staying == {"test_texts_are_equal[llama]", "test_texts_are_equal[gpt-oss]", "test_alone"}


def test_a_principal_case_that_there_is_not_is_refused(collected):
    marked = '@pytest.mark.principal("llama", "lama")' + FAMILIES
    assert "test_texts_are_equal: principal names no case of it: lama" in collected(marked).refusal
    assert collected(marked, whole=False).refusal == ""  # one case of it may be all that was asked for


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ("", "say beside=, which test stays for it"),
        ('beside="test_other"', "exhaustive beside .*::test_other, which is none that stays"),
        ('beside="test_texts_are_equal"', "which is none that stays"),
        ('beside="test_short"', "^$"),
    ],
)
def test_a_test_that_is_a_repeat_as_a_whole_names_one_that_stays(beside, why, collected):
    found = collected(f"@pytest.mark.exhaustive({beside})" + FAMILIES + "\ndef test_short():\n    pass\n")
    assert found.staying == {"test_short"}
    assert re.search(why, found.refusal), found.refusal
