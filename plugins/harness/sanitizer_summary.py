"""Says in Markdown what compute-sanitizer reported of the kernels, and which reduced programs explain it.

A reduced program is a CUDA source beside this file whose first line is `// sanitizer: TOOL PATTERN`. It explains a
report of that tool in which PATTERN, a regular expression, is found (a function or a source; racecheck names no kernel
where a function is inlined), if the program, which has no fault, has reports of the same kinds. `plugins/sanitize.sh`
runs the tools and calls this.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "synccheck", "racecheck")
MARK = "========="
#: The last line of `every_kernel.py`, if none of its groups failed.
FINISHED = "every group of kernels ran"

HEADER = re.compile(r"// sanitizer: (\w+) (\S+)$")
TOTAL = re.compile(r"ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: (\d+) hazards? displayed")
#: Lines at the margin that begin no report.
NO_REPORT = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|Target application returned an error|$")


@dataclass(frozen=True)
class Report:
    """One report: its first line, and those that say where."""

    lines: tuple[str, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """What it reports, without places; a race once for each pair of accesses."""
        race = re.match(r"(\w+: )?Race reported between (\w+) access", self.lines[0])
        if not race:
            return frozenset({re.sub(r" at .*|0x[0-9a-f]+|\.$", "", self.lines[0])})
        others = re.findall(r"\band (\w+) access", " ".join(self.lines))
        pairs = {tuple(sorted((race[2], other))) for other in others}
        return frozenset(f"{race[1] or ''}Race between {a} and {b}" for a, b in pairs)

    @property
    def code(self) -> str:
        """Names of its kernels. racecheck names the functions that are inlined into a kernel instead: those then."""
        kernels = re.findall(r"\w+_kernel\b", self.text)
        functions = map(name_of, re.findall(r"\bat (.+)\+0x", self.text))
        return ", ".join(dict.fromkeys(kernels or functions)) or "?"

    @property
    def said(self) -> tuple[str, str]:
        """What it reports, and the sources' lines."""
        places = dict.fromkeys(re.findall(r"[\w.]+\.cuh?:\d+", self.text))
        return "; ".join(sorted(self.kinds)), ", ".join(places) or "?"

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Log:
    """What a tool wrote: its reports, and the number of errors that it counted; None: it did not come to an end."""

    reports: list[Report]
    count: int | None

    @classmethod
    def read(cls, path: Path) -> "Log":
        text = path.read_text(errors="replace") if path.is_file() else ""
        lines = [line.removeprefix(MARK).rstrip() for line in text.splitlines() if line.startswith(MARK)]
        totals = [found for line in lines if (found := TOTAL.search(line))]
        count = int(totals[0][1] or totals[0][2]) if totals else None
        return cls(list(reports_of(lines)), count)

    def complaint(self, output: str) -> str:
        """Why tool and program, whose output this is, did not show everything; empty: they did."""
        if self.count is None:
            return "the tool did not come to an end"
        if self.count > len(self.reports):
            return f"only {len(self.reports)} of {self.count} reports were printed"
        last = output.strip().rpartition("\n")[2]
        return "" if last == FINISHED else f"not all kernels ran: {last}"


def name_of(function: str) -> str:
    """Name of a function from its declaration, without types, template arguments and our namespace."""
    function, outer = function.replace("(anonymous namespace)::", ""), ""
    while outer != function:
        outer, function = function, re.sub(r"<[^<>]*>", "", function)
    return function.partition("(")[0].rpartition(" ")[2].removeprefix("dflash::")


def reports_of(lines: list[str]) -> Iterator[Report]:
    """Reports begin at the margin (one space), and what belongs to them is further in; hosts' stacks are left out."""
    block: list[str] = []
    for line in [*lines, ""]:
        is_inside = line.startswith("  ") or (block and line.startswith(" and "))
        if is_inside:
            if block and "Host Frame" not in line and "host backtrace" not in line:
                block.append(line.strip())
            continue
        if block:
            yield Report(tuple(block))
        block = [] if NO_REPORT.match(line.strip()) else [line.strip()]


@dataclass(frozen=True)
class Program:
    """A reduced program: its tool, what it stands for, and what it was found to report."""

    name: str
    tool: str
    pattern: str
    log: Log

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset().union(*(report.kinds for report in self.log.reports))

    def explains(self, tool: str, report: Report) -> bool:
        return tool == self.tool and bool(re.search(self.pattern, report.text)) and report.kinds <= self.kinds


def read_header(source: Path) -> tuple[str, str]:
    """The tool that a reduced program names, and the pattern of what it explains."""
    found = HEADER.match(source.read_text().split("\n", 1)[0])
    if not found or found[1] not in TOOLS:
        sys.exit(
            f"error: {source}: its first line must be `// sanitizer: TOOL PATTERN`, TOOL one of {', '.join(TOOLS)}"
        )
    return found[1], found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="?", help="folder of TOOL.log, TOOL.out, ..., NAME.log")
    parser.add_argument("--programs", type=Path, default=Path(__file__).parent, help="folder of the reduced programs")
    parser.add_argument("--list", action="store_true", help="print each reduced program's name and tool, and end")
    settings = parser.parse_args()
    sources = sorted(settings.programs.glob("*.cu"))
    if settings.list:
        for source in sources:
            print(source.stem, read_header(source)[0])
        return
    programs = [Program(x.stem, *read_header(x), Log.read(settings.logs / f"{x.stem}.log")) for x in sources]
    lines, is_clean = summarize(settings.logs, programs)
    print("\n".join(lines))
    sys.exit(0 if is_clean else 1)


def summarize(logs: Path, programs: list[Program]) -> tuple[list[str], bool]:
    """The tables, and whether every tool came to an end and every report is explained."""
    lines = ["# The kernels under compute-sanitizer", ""]
    lines += [(logs / name).read_text().strip() for name in ("machine.txt", "kernels.txt")]
    tools, reports = [], Counter[tuple[str, ...]]()
    complaints: list[str] = []
    used = Counter[str]()
    runs = [(tool, file) for tool in TOOLS for file in sorted(logs.glob(f"{tool}*.seconds"))]
    complaints += [f"- {tool}: it did not run" for tool in TOOLS if tool not in {ran for ran, _ in runs}]
    for tool, file in runs:
        name = file.stem
        log = Log.read(logs / f"{name}.log")
        unexplained = 0
        for report in log.reports:
            names = [program.name for program in programs if program.explains(tool, report)]
            used.update(names)
            unexplained += not names
            reports.update([(tool, f"`{report.code}`", *report.said, ", ".join(names) or "**nothing**")])
        tools.append((name, "?" if log.count is None else log.count, unexplained, file.read_text().strip()))
        complaint = log.complaint((logs / f"{name}.out").read_text())
        complaints += [f"- {name}: {complaint}"] if complaint else []
        complaints += [f"- {name}: {unexplained} unexplained"] if unexplained else []
    reduced = [(f"`{x.name}.cu`", x.tool, "; ".join(sorted(x.kinds)) or "none", used[x.name]) for x in programs]
    lines += table("tool, errors, not explained, seconds", tools)
    lines += table(
        "tool, kernel or function, report, where, explained by, reports",
        [(*key, n) for key, n in sorted(reports.items())],
    )
    lines += table("reduced program, tool, its reports, the kernels' that it explains", reduced)
    return lines + ([""] if complaints else []) + complaints, not complaints


def table(columns: str, rows: Sequence[tuple[object, ...]]) -> list[str]:
    """Lines of a table in Markdown; none without rows."""
    if not rows:
        return []
    names = columns.split(", ")
    return ["", *(f"| {' | '.join(map(str, row))} |" for row in (names, ["---"] * len(names), *rows))]


if __name__ == "__main__":
    main()
