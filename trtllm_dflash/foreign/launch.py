"""`launch`: a runtime's command and files, as a script that can be read and pasted; checked, and started."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.marks import kill_marked
from trtllm_dflash.signals import ENDING, is_heard

_GRACE = 30.0  # seconds that a runtime gets to end by itself
_PAUSE = 0.1
_MARK = "TRTLLM_DFLASH_LAUNCH"  # in the environment of all that a launch starts
_CHECK_SECONDS = 180.0


@dataclass(frozen=True)
class Option:
    """A flag with its value, as words of the command line, and why it has that value."""

    words: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Runtime:
    """A runtime's name, package, versions and command.

    Attributes:
        title: its name, as its authors write it.
        package: what is imported, and installed.
        versions: those whose fields the schema was read from.
        install: one line.
        program, module: its command, and the module that is the same thing.
        check: Python that its own parser validates with: words in sys.argv, an exception where it refuses.
    """

    title: str
    package: str
    versions: str
    install: str
    program: str
    module: str
    check: str


@dataclass(frozen=True)
class Launch:
    """A runtime's whole configuration.

    Attributes:
        head: remarks that precede the command.
        files: text by name, to stand in the folder that the command runs in.
        command: the words before the options.
        checked: the words that the runtime's own parser is given.
        checks_options: whether they have the options, so that a user's own are checked too.
    """

    runtime: Runtime
    head: tuple[str, ...]
    command: tuple[str, ...]
    options: tuple[Option, ...]
    checked: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    checks_options: bool = True

    def with_words(self, words: tuple[str, ...]) -> "Launch":
        """Adds a user's own words, as the runtime's command takes them, after all others: the last of a flag wins.

        Raises:
            SettingsError: they do not begin with a flag.
        """
        if not words:
            return self
        if not words[0].startswith("-"):
            raise SettingsError(
                f"{words[0]}: no such argument; what follows -- is the runtime's own, and begins with a flag"
            )
        checked = (*self.checked, *words) if self.checks_options else self.checked
        return replace(self, options=(*self.options, Option(words, "your own, after --")), checked=checked)

    @property
    def words(self) -> list[str]:
        """Joins the command and its options into the words of a command line."""
        return [*self.command, *(word for option in self.options for word in option.words)]

    @property
    def remarks(self) -> list[str]:
        """Writes the head as comments of bash and YAML, every line of a remark that has several."""
        return [f"# {line}" for remark in self.head for line in remark.splitlines()]

    def script(self) -> str:
        """Writes a bash script: the files, then the command with a remark for each option."""
        lines = ["#!/usr/bin/env bash", *self.remarks]
        for name, text in self.files.items():
            lines += ["", f"cat > {shlex.quote(name)} <<'END'", text.rstrip("\n"), "END"]
        lines += ["", "options=("]
        for option in self.options:
            lines += [f"  # {option.why}", "  " + shlex.join(option.words)]
        lines += [")", f'{shlex.join(self.command)} "${{options[@]}}"']
        return "\n".join(lines) + "\n"


def start(launch: Launch, folder: Path | None = None) -> int:
    """Validates with the runtime's own parser, then runs the server until it or Ctrl-C ends it; its exit code.

    Ctrl-C and SIGTERM are handed on; what has not ended by itself then, wherever it has gone, is killed.

    Args:
        folder: where the files are written, and kept; else a temporary one.

    Raises:
        EngineError: the runtime is not installed, or refuses the configuration.
        SettingsError: the files cannot be written.
    """
    python = find_python(launch)
    with tempfile.TemporaryDirectory(prefix="trtllm-dflash-launch-") as temporary:
        where = Path(temporary) if folder is None else folder
        write_files(launch, where)
        check(launch, python, where)
        return _run(_as_installed(launch, python), where)


def _as_installed(launch: Launch, python: str) -> list[str]:
    """Makes the command line run by the interpreter that has the runtime, wherever its programs were installed."""
    runtime = launch.runtime
    beside = Path(python).parent / runtime.program
    program = [str(beside)] if beside.is_file() else [python, "-m", runtime.module]
    command = [
        part
        for word in launch.command
        for part in (program if word == runtime.program else [python] if word == "python" else [word])
    ]
    return command + launch.words[len(launch.command) :]


def write_files(launch: Launch, folder: Path) -> None:
    """Writes the files that the command reads.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in launch.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output {folder}: cannot be written ({error.strerror})") from None


def find_python(launch: Launch) -> str:
    """Finds the interpreter that has the runtime: this one, or that of its command on PATH.

    Raises:
        EngineError: there is none; says how to install it.
    """
    if find_spec(launch.runtime.package) is not None:
        return sys.executable
    found = shutil.which(launch.runtime.program)
    if found is not None:
        with suppress(OSError, UnicodeDecodeError):
            first = Path(found).read_text(encoding="utf-8").partition("\n")[0]
            if first.startswith("#!") and "python" in first and " " not in first:
                return first.removeprefix("#!")
    runtime = launch.runtime
    raise EngineError(f"{runtime.title} is not installed here: {runtime.install}; or see what would run: --dry-run")


def check(launch: Launch, python: str, folder: Path) -> None:
    """Validates options and files with the runtime's own parser.

    Raises:
        EngineError: it refuses them; with its last line.
    """
    command = [python, "-c", launch.runtime.check, *launch.checked]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_CHECK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{launch.runtime.title}'s own parser took more than {_CHECK_SECONDS:g} s") from None
    if done.returncode != 0:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise EngineError(
            f"{launch.runtime.title}'s own parser refuses this configuration, which was made for "
            f"{launch.runtime.versions}: {reason}"
        )


# -- running ---------------------------------------------------------------------------------------------------------


def _run(words: list[str], folder: Path) -> int:
    mark = f"{_MARK}={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    asked: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    numbers = filter(is_heard, ENDING)
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        try:
            # A new session keeps Ctrl-C on the terminal to us, who hand it on once.
            process = subprocess.Popen(words, cwd=folder, env={**os.environ, name: value}, start_new_session=True)
        except OSError as error:
            raise EngineError(f"{words[0]}: cannot be started ({error.strerror})") from None
        try:
            while process.poll() is None and not asked:
                time.sleep(_PAUSE)
            if process.poll() is None:
                _end(process, asked)
        finally:
            kill_marked(mark)  # runtimes start workers in sessions of their own, which may outlive them
        process.wait()
        return 128 + asked[0] if asked else process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: "subprocess.Popen[bytes]", asked: list[int]) -> None:
    """Lets the runtime end in order; a second Ctrl-C leaves it no more time."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, asked[0])
    deadline = time.monotonic() + _GRACE
    while process.poll() is None and len(asked) < 2 and time.monotonic() < deadline:
        time.sleep(_PAUSE)
