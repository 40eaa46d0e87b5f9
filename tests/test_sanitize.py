"""plugins/sanitize.sh: what it makes of compute-sanitizer's words. Tools, compiler and GPU are stand-ins here."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[1] / "plugins"

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACES_CLEAN = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between {0} access at void dflash::sum_kernel<__half>(dflash::Work)+0x13d0 in sum.cuh:482
=========     and Write access at void dflash::sum_kernel<__half>(dflash::Work)+0x1570 in sum.cuh:515 [6144 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
REDUCED_RACE = RACE.replace("void dflash::sum_kernel<__half>(dflash::Work)", "reduced(float *)").replace(
    "sum.", "reduced."
)
#: As of templates and inlined functions: neither place names the kernel, and one read meets several writes.
INLINED_RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at dflash::merge_rows(float (&)[4], const float4 &, \
const float (&)[2], const float (&)[2])+0x4b70 in attention_softmax.cuh:96
=========     and Write access at dflash::sm90::Mainloop<__half, (int)64, (bool)0>::merge(float (&)[4][4])+0x42c0 \
in attention_sm90.cuh:337 [2048 hazards]
=========     and Write access at dflash::sm90::Mainloop<__half, (int)64, (bool)0>::merge(float (&)[4][4])+0x4310 \
in attention_sm90.cuh:337 [1536 hazards]
=========
========= Error: Race reported between Read access at void dflash::gather<pair<int, pair<__half, float>>, \
(int)8>(T1 *, int)+0xb0 in sum.cuh:40
=========     and Write access at void dflash::gather<pair<int, pair<__half, float>>, (int)8>(T1 *, int)+0x90 \
in sum.cuh:38 [16 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
DIVERGENT = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at meet(int)+0x2c80 in sum.cu:{0}
=========     by thread ({0},0,0) in block (0,0,0)
=========         Device Frame: dflash::sum_kernel(dflash::Launch)+0x2c00 in sum.cu:963
=========
========= ERROR SUMMARY: 1 error
"""
RAN = "every group of kernels ran"

#: racecheck runs over one group of kernels at a time.
GROUPS = ("sums", "attention", "products-48x192")
RACECHECKS = [*(f"racecheck-{group}" for group in GROUPS), "racecheck-without-hopper"]

STUBS = {
    "nvidia-smi": 'echo "NVIDIA H200, 9.0"',
    "nm": "true",
    "c++filt": "true",
    # Compiles nothing: what it is asked for ends with 0.
    "nvcc": """
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\n' > "$2"; chmod +x "$2"
""",
    # Gives the words that the test has laid down for a log of that name, and runs the command.
    "compute-sanitizer": """
if [ "$1" = --version ]; then echo "Version 2025.3.1.0 (build 1)"; exit; fi
while [[ $1 == --* ]]; do
    if [ "$1" = --log-file ]; then cp "$SAID/$(basename "$2")" "$2"; fi
    shift 2
done
"$@"
""",
    "python": f"""
case "$*" in
    *every_kernel.py*--cover*) echo "7 of the library's 8 kernels ran, in 9 launches."; exit $LEFT_OUT ;;
    *every_kernel.py*--list*) printf '%s\\n' {" ".join(GROUPS)} ;;
    *every_kernel.py*) cat "$SAID/last_line" ;;
    *) exec {sys.executable} "$@" ;;
esac
""",
}


@pytest.fixture
def sanitize(tmp_path):
    """Runs a copy of the script with what tools say of the kernels, and reduced programs: code, summary and stderr."""
    said, stubs, plugins = (tmp_path / name for name in ("said", "stubs", "plugins"))
    for folder in (said, stubs, plugins / "harness"):
        folder.mkdir(parents=True)
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{text}")
        (stubs / name).chmod(0o755)
    for name in ("sanitize.sh", "harness/sanitizer_summary.py"):
        shutil.copy(PLUGINS / name, plugins / name)

    def sanitize(logs=None, programs=None, last_line=RAN, left_out=0):
        words = {"memcheck": CLEAN, "synccheck": CLEAN, **dict.fromkeys(RACECHECKS, RACES_CLEAN), **(logs or {})}
        for name, (source, text) in (programs or {}).items():
            (plugins / "harness" / f"{name}.cu").write_text(source)
            words[name] = text
        for name, text in words.items():
            (said / f"{name}.log").write_text(text)
        (said / "last_line").write_text(last_line + "\n")
        environment = {"PATH": f"{stubs}:/usr/bin:/bin", "PYTHON": "python", "SAID": str(said)}
        environment["LEFT_OUT"] = str(left_out)
        command = [plugins / "sanitize.sh", tmp_path / "summary.md", tmp_path / "logs"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        summary = tmp_path / "summary.md"
        return done.returncode, summary.read_text() if summary.exists() else "", done.stderr

    return sanitize


def test_kernels_without_a_report_are_clean(sanitize):
    code, summary, _ = sanitize()
    assert code == 0
    assert "compute-sanitizer 2025.3.1.0, one NVIDIA H200." in summary
    assert "7 of the library's 8 kernels ran, in 9 launches." in summary
    assert all(f"| {name} | 0 | 0 |" in summary for name in ("memcheck", "synccheck", *RACECHECKS))


def test_a_kernel_that_was_left_out_is_an_error(sanitize):
    code, summary, stderr = sanitize(left_out=1)
    assert code == 1
    assert "| memcheck | 0 | 0 |" in summary and "a kernel was left out" in stderr


@pytest.mark.parametrize(
    ("tool", "words"), [("racecheck-sums", RACE.format("Read")), ("synccheck", DIVERGENT.format(171))]
)
def test_a_report_that_nothing_explains_is_an_error(sanitize, tool, words):
    code, summary, _ = sanitize({tool: words})
    assert code == 1
    assert f"| {tool} | 1 | 1 |" in summary
    assert "`sum_kernel`" in summary and "**nothing**" in summary
    assert f"- {tool}: 1 unexplained" in summary


def test_a_report_of_inlined_functions_names_them_and_each_line_once(sanitize):
    code, summary, _ = sanitize({"racecheck-attention": INLINED_RACE})
    assert code == 1
    assert "| racecheck-attention | 2 | 2 |" in summary
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in summary.splitlines() if "**nothing**" in line]
    race = "Error: Race between Read and Write"
    assert rows == [
        ["racecheck", "`gather`", race, "sum.cuh:40, sum.cuh:38", "**nothing**", "1"],
        [
            *("racecheck", "`merge_rows, sm90::Mainloop::merge`", race),
            *("attention_softmax.cuh:96, attention_sm90.cuh:337", "**nothing**", "1"),
        ],
    ]


def test_a_reduced_program_explains_reports_of_inlined_functions_by_their_source(sanitize):
    programs = {"reduced": ("// sanitizer: racecheck attention_sm90.cuh|sum.cuh\n", REDUCED_RACE.format("Read"))}
    code, summary, _ = sanitize({"racecheck-attention": INLINED_RACE}, programs)
    assert code == 0, summary


def test_a_reduced_program_explains_reports_of_its_kinds_where_it_says(sanitize):
    programs = {
        "two_branches": ("// sanitizer: synccheck sum_kernel\n", DIVERGENT.format(20)),
        "two_proxies": ("// sanitizer: racecheck sum.cuh\n", REDUCED_RACE.format("Read")),
    }
    code, summary, _ = sanitize({"racecheck-sums": RACE.format("Read"), "synccheck": DIVERGENT.format(171)}, programs)
    assert code == 0, summary
    assert "| synccheck | 1 | 0 |" in summary
    assert "| sum.cu:171, sum.cu:963 | two_branches | 1 |" in summary
    assert "| sum.cuh:482, sum.cuh:515 | two_proxies | 1 |" in summary


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("// sanitizer: racecheck other_kernel\n", REDUCED_RACE.format("Read")),  # of another kernel
        ("// sanitizer: racecheck sum_kernel\n", REDUCED_RACE.format("Write")),  # another race
        ("// sanitizer: racecheck sum_kernel\n", RACES_CLEAN),  # the tool finds no fault in it
        ("// sanitizer: synccheck sum_kernel\n", REDUCED_RACE.format("Read")),  # under another tool
    ],
)
def test_a_reduced_program_explains_nothing_else(sanitize, source, words):
    code, summary, _ = sanitize({"racecheck-sums": RACE.format("Read")}, {"reduced": (source, words)})
    assert code == 1
    assert "- racecheck-sums: 1 unexplained" in summary


@pytest.mark.parametrize(
    ("words", "last_line", "complaint"),
    [
        ("========= COMPUTE-SANITIZER\n", RAN, "synccheck: the tool did not come to an end"),
        (DIVERGENT.format(171).replace("1 error\n", "300 errors\n"), RAN, "only 1 of 300 reports were printed"),
        (CLEAN, "failed: products", "synccheck: not all kernels ran: failed: products"),
    ],
)
def test_a_tool_that_did_not_see_everything_is_an_error(sanitize, words, last_line, complaint):
    program = {"two_branches": ("// sanitizer: synccheck sum_kernel\n", DIVERGENT.format(20))}
    code, summary, _ = sanitize({"synccheck": words}, program, last_line)
    assert code == 1
    assert complaint in summary


def test_a_reduced_program_that_names_no_kernel_ends_it_before_anything_runs(sanitize):
    code, summary, stderr = sanitize({}, {"reduced": ("// sanitizer: racecheck\n", RACES_CLEAN)})
    assert code == 1 and not summary
    assert "reduced.cu: its first line must be `// sanitizer: TOOL PATTERN`" in stderr
