"""The package's rooms: imports run from higher ones to lower ones, never in a circle, and no file grows too long."""

import ast
from functools import cache
from pathlib import Path

import trtllm_dflash

PACKAGE = Path(trtllm_dflash.__file__).parent
ROOT = PACKAGE.name

#: Rooms, folders and modules alike, from the ground up. A room imports from itself and from those below its line.
LAYERS = (
    {"errors", "extras", "signals", "marks"},
    {"pairs"},
    {"api_key", "output", "text"},
    {"kernels"},
    {"ops"},
    {"models"},
    {"step"},
    {"checkpoint"},
    {"catalog"},
    {"engine"},
    {"cost"},
    {"session"},
    {"build"},
    {"runtime"},
    {"llm"},
    {"model_card"},
    {"serving"},
    {"quantize"},
    {"train"},
    {"bench"},
    {"sweep"},
    {"foreign"},
    {"demo", "doctor"},
    {"commands"},
    {"cli"},
    {"__main__"},
)

MOST_LINES = 500


@cache
def imports() -> dict[str, set[str]]:
    """Our modules that each of our modules imports, wherever it does: at its top, in a function, or for types alone."""
    files = {_name(file): file for file in PACKAGE.rglob("*.py")}
    return {name: _imports_of(file, files.keys()) - {name, ROOT} for name, file in files.items() if name != ROOT}


def _name(file: Path) -> str:
    parts = [ROOT, *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_of(file: Path, modules) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            # What is imported from a package may be a module of it, or a name in its __init__.
            inside = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {module if module in modules else str(node.module) for module in inside.values()}
    return names & modules


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_its_layer():
    placed = [name for layer in LAYERS for name in layer]
    assert len(placed) == len(set(placed))
    assert {room(module) for module in imports()} <= set(placed)


def test_no_room_imports_from_a_higher_one():
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    pairs = [(module, other) for module, others in imports().items() for other in others]
    assert not [f"{module} -> {other}" for module, other in pairs if level[room(other)] > level[room(module)]]


def test_no_imports_run_in_a_circle():
    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = imports()[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    assert not [module for module in imports() if module in reached(module)]


def test_nothing_but_the_program_imports_the_command_line():
    importers = {module for module, others in imports().items() if f"{ROOT}.cli" in others}
    assert importers == {f"{ROOT}.__main__"}


def test_no_file_is_too_long():
    lengths = {str(file.relative_to(PACKAGE)): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert not {file: length for file, length in lengths.items() if length > MOST_LINES}


FRAGMENTS = {
    "As",
    "By",
    "For",
    "From",
    "How",
    "In",
    "Into",
    "Likewise",
    "Of",
    "What",
    "When",
    "Where",
    "Which",
    "Why",
    "With",
}


def fragments() -> list[str]:
    """Docstrings of modules, classes and functions whose first word belongs to a clause, and what has them."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].rstrip(",;:.") in FRAGMENTS:
                    found.append(f"{_name(file)}.{getattr(node, 'name', '')}: {' '.join(words[:6])}")
    return found


def test_a_docstring_begins_with_a_verb_or_a_noun():
    assert fragments() == []
