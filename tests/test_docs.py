"""What a reader of the documentation would follow leads somewhere: links, files, names, code; and tables are whole."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pages import DOCS, GUIDES, PAGES, ROOT, anchors, name_of, python_blocks, rows, spans
from trtllm_dflash.runtime.statistics import Statistics

PACKAGE = ROOT / "trtllm_dflash"
PLUGINS = ROOT / "plugins"
ARCHITECTURE = DOCS / "architecture.md"

MOST_README_LINES = 150
SOURCES = (".py", ".cu", ".cuh", ".h", ".cpp", ".sh", ".md", ".yaml", ".toml", ".pbtxt")
#: Folders that the pages name and that are made by commands.
MADE = {"dist/"}
STATUS_WORDS = ("measured", "compiled", "untested")


# -- links and files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


def is_there(name: str, page: Path) -> bool:
    """Whether a source file or folder has this path from the page, the checkout, the package or the kernels.

    A name alone may be that of any file of the package, in a text that has said where.
    """
    places = (page.parent, ROOT, PACKAGE, PLUGINS, PLUGINS / "src")
    found = any(any(place.glob(name.rstrip("/"))) for place in places)
    return found or ("/" not in name and any(PACKAGE.rglob(name)))


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_files_in_backticks_are_there(page: Path) -> None:
    named = [span for span in spans(page) if re.fullmatch(r"\w[\w.*-]*(/[\w.*-]+)*/?", span)]
    files = {span for span in named if span.endswith((*SOURCES, "/"))} - MADE
    assert not [name for name in files if "NAME" not in name and not is_there(name, page)]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_pages_begin_with_whom_they_are_for() -> None:
    for page in set(DOCS.glob("*.md")) - {DOCS / "README.md"}:
        title, empty, first = page.read_text().splitlines()[:3]
        assert title.startswith("# ") and not empty and first.startswith("For "), name_of(page)


# -- code --------------------------------------------------------------------------------------------------------------


def test_python_in_the_pages_compiles_and_its_imports_exist() -> None:
    blocks = [(page, block) for page in PAGES for block in python_blocks(page)]
    assert blocks
    for page, block in blocks:
        for node in ast.walk(ast.parse(block, name_of(page))):
            if isinstance(node, ast.Import):
                assert all(find_spec(alias.name) is not None for alias in node.names), name_of(page)
            elif isinstance(node, ast.ImportFrom):
                module = import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), f"{name_of(page)}: {module.__name__}"


def names(statements: list[ast.stmt]) -> Iterator[str]:
    """What statements define in the scope that they stand in."""
    for statement in statements:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        yield from (target.id for target in targets if isinstance(target, ast.Name))


@cache
def package() -> tuple[set[str], dict[str, set[str]]]:
    """What the package's modules define, and what each of their classes does, its bases included."""
    trees = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]
    classes: dict[str, list[ast.ClassDef]] = {}  # of one name, in several modules
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        classes.setdefault(node.name, []).append(node)

    def members(name: str) -> set[str]:
        return set[str]().union(*map(members_of, classes.get(name, [])))

    def members_of(node: ast.ClassDef) -> set[str]:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]  # Ops[T] is Ops
        known = [base.id for base in bases if isinstance(base, ast.Name) and base.id != node.name]
        return set(names(node.body)).union(*map(members, known))

    return {name for tree in trees for name in names(tree.body)}, {name: members(name) for name in classes}


@cache
def kernels() -> set[str]:
    """Structures, functions and constants of the CUDA sources."""
    text = "\n".join(file.read_text() for folder in ("src", "include") for file in (PLUGINS / folder).iterdir())
    return {*re.findall(r"(?:struct|#define) (\w+)", text), *re.findall(r"(\w+)\(", text)}


def is_ours(name: str) -> bool:
    """Whether `Class`, `Class.member`, `function()` or `CONSTANT` is one of ours."""
    top, classes = package()
    owner, _, member = name.removesuffix("()").partition(".")
    return member in classes.get(owner, set()) if member else owner in top or owner in kernels()


def test_names_in_the_architecture_page_are_those_of_the_code() -> None:
    pattern = r"_?[A-Z]\w*[a-z]\w*(\.\w+)?|\w+\(\)|[A-Z]+(_[A-Z]+)*"
    named = [span for span in spans(ARCHITECTURE) if re.fullmatch(pattern, span)]
    assert len(named) > 100
    assert not [name for name in named if not is_ours(name)]


@pytest.mark.parametrize("name", ["Scheduler.no_such", "NoSuchClass", "no_such_function()", "NO_SUCH"])
def test_a_name_that_is_gone_is_seen(name: str) -> None:
    assert not is_ours(name)


# -- tables ------------------------------------------------------------------------------------------------------------


def test_support_is_said_in_three_words() -> None:
    cells = [row[-2:] for row in rows(DOCS / "support.md") if len(row) > 2 and row[0] not in ("backend", "serving")]
    assert len(cells) > 30
    assert not [pair for pair in cells if not all(cell.startswith(STATUS_WORDS) for cell in pair)]


def test_every_metric_is_documented() -> None:
    named = {name for row in rows(DOCS / "deploy.md") for name in re.findall(r"`(dflash_\w+)`", row[0])}
    counted = Statistics()
    counted.requests["completed"] = counted.steps["decode"] = counted.verified[1, 1] = counted.ranks[1] = 1
    published = {re.sub(r"_(bucket|sum|count)$", "", sample.name) for sample in counted.samples()}
    assert named == published


def test_every_room_is_in_the_architecture_page() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    named = {name.rstrip("/") for row in rows(ARCHITECTURE) for name in re.findall(r"`([\w.]+/?)`", row[0])}
    assert rooms - {"__init__.py", "__main__.py"} <= named
