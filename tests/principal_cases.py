"""Which tests `make test` runs: the principal cases of each claim. `make test-all` runs their repeats too.

`principal("id", ...)` names the cases of a parametrized test that stay, and its others become `exhaustive`. A test that
is `exhaustive` as a whole names the one that stays for it: `exhaustive(beside="test_name")`, or "file::test_name".
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_repeats(items: Iterable[pytest.Item], whole: bool) -> None:
    """Marks the cases that `principal` does not name; refuses names of none, and claims of which nothing stays.

    Args:
        whole: whether files were collected, and not single tests of them.
    """
    cases = defaultdict(list)  # by test
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for test, its in cases.items():
        for marker in its[0].iter_markers("principal"):
            repeats = [item for item in its if case_of(item) not in marker.args]
            unknown = set(marker.args) - {case_of(item) for item in its}
            if whole and unknown:
                raise pytest.UsageError(f"{test}: principal names no case of it: {', '.join(sorted(unknown))}")
            for item in repeats:
                item.add_marker(pytest.mark.exhaustive)
    if whole:
        staying = {
            test for test, its in cases.items() if any(not item.get_closest_marker("exhaustive") for item in its)
        }
        for test in cases.keys() - staying:
            check_that_one_stays(test, cases[test][0], staying, {node.partition("::")[0] for node in cases})


def case_of(item: pytest.Item) -> str:
    """The id of a parametrized test's case."""
    return item.name.partition("[")[2].removesuffix("]")


def check_that_one_stays(test: str, item: pytest.Item, staying: set[str], files: set[str]) -> None:
    """Refuses a test all of whose cases are exhaustive, unless it names one that stays."""
    named = [marker.kwargs["beside"] for marker in item.iter_markers("exhaustive") if "beside" in marker.kwargs]
    if not named:
        raise pytest.UsageError(f"{test}: all cases are exhaustive; say beside=, which test stays for it")
    (beside,) = named
    node = beside if "::" in beside else test.rpartition("::")[0] + "::" + beside
    if node.partition("::")[0] in files and node not in staying:
        raise pytest.UsageError(f"{test}: exhaustive beside {node}, which is none that stays")
