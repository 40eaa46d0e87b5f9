"""The documentation's pages, taken apart: their code, what stands in backticks, and the rows of their tables."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PATTERNS = ("*.md", "docs/*.md", "examples/**/*.md", "[!.]*/README.md", "benchmarks/results/*.md")
PAGES = sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern)})
#: The pages that say how things are used today; records of measurements say how they were used then.
GUIDES = [page for page in PAGES if page.parent.name != "results"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines(page: Path) -> Iterator[tuple[str, bool]]:
    """Each line of a page, and whether it is code: in a fence, or set in behind an empty line."""
    fenced, code, empty = False, False, True
    for line in page.read_text().replace("\\\n", " ").splitlines():
        is_fence = line.startswith("```")
        code = fenced or is_fence or (line.startswith("    ") and (code or empty))
        fenced ^= is_fence
        empty = not line.strip()
        yield line, code


def calls(program: str) -> list[tuple[Path, list[str]]]:
    """What follows a program's name in every line of code that calls it, by page; shell syntax is left out."""
    found = [(page, re.sub(r"^(\w+=\S+ )+", "", line.strip())) for page in PAGES for line, code in lines(page) if code]
    words = [(page, shlex.split(line, comments=True)) for page, line in found if line.split(" ")[0] == program]
    return [(page, line[1 : line.index(">") if ">" in line else None]) for page, line in words]


def spans(page: Path) -> list[str]:
    """What stands in backticks within a page's text."""
    text = "\n".join(line for line, code in lines(page) if not code)
    return re.findall(r"`([^`\n]+)`", text)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def rows(page: Path) -> list[list[str]]:
    """The cells of each row of a page's tables, headings included."""
    tables = [line.strip() for line, code in lines(page) if not code and line.lstrip().startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in tables if not set(row) <= set("|-: ")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings]
    return {heading.strip().lower().replace(" ", "-") for heading in plain}
