"""The state directory of a training: a manifest of its phases, and the files that each has made.

A phase that is done stays done while its settings and its files are what they were; one that was interrupted goes on
where it stood. Files are written aside and renamed, so that a process that is killed leaves none half-written.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trtllm_dflash.cost.gpus import gigabytes
from trtllm_dflash.engine.directory import digest
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.output import held, writing

MANIFEST = "manifest.json"


class Phase(BaseModel):
    """The manifest's entry of a phase."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]  # that it was begun with
    facts: dict[str, Any] = {}  # that it found: counts, and measured rates
    files: dict[str, str] = {}  # once it is done: file -> sha256
    done: bool = False


class Manifest(BaseModel):
    """The content of the manifest."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    target: str  # its digest
    phases: dict[str, Phase] = {}


class State:
    """An opened state directory; `opened` opens one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, target: str) -> Iterator["State"]:
        """Opens a state directory, or makes one, for a target of this digest; nobody else can meanwhile.

        Raises:
            SettingsError: it is another target's, another process's, no state directory, or cannot be written.
        """
        with writing(folder):
            if folder.exists() and not folder.is_dir():
                raise SettingsError(f"--output {folder}: is a file; name a folder")
            if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
                raise SettingsError(f"--output {folder}: is no state directory of a training; use another folder")
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            with held(folder, "training"):
                manifest = _read_manifest(folder) or Manifest(target=target)
                if manifest.target != target:
                    raise SettingsError(
                        f"--output {folder}: belongs to a target with other files ({manifest.target[:12]}, not "
                        f"{target[:12]}); use another folder"
                    )
                state = cls(folder, manifest)
                state._write_manifest()
                try:
                    yield state
                except BaseException:
                    if is_new and {entry.name for entry in folder.iterdir()} == {MANIFEST}:
                        shutil.rmtree(folder)  # there is nothing to go on from
                    raise

    def begin(self, name: str, settings: Mapping[str, Any], at_once: bool = False) -> bool:
        """Begins a phase, or goes on with it; returns False where it is done already.

        A phase that makes all that it makes `at_once` begins anew, with whatever settings, until it is done.

        Raises:
            SettingsError: it was begun with other settings, or a file that it made has changed.
        """
        phase = self._manifest.phases.get(name)
        given = json.loads(json.dumps(dict(settings)))
        if phase is None or (at_once and not phase.done):
            self._manifest.phases[name] = Phase(settings=given)
            self._write_manifest()
            return True
        for key in given.keys() | phase.settings.keys():
            before, now = phase.settings.get(key), given.get(key)
            if before != now:
                flag = "--" + key.replace("_", "-")
                raise SettingsError(
                    f"{flag}: {self.folder} was begun with {before}, not {now}; keep it, or use another --output"
                )
        if phase.done:
            for file, known in phase.files.items():
                path = self.folder / file
                if not path.is_file() or digest(path) != known:
                    raise SettingsError(f"{path}: is missing or has changed since it was made; use another --output")
        return not phase.done

    def note(self, name: str, **facts: Any) -> None:
        """Keeps facts of a phase in the manifest."""
        self._manifest.phases[name].facts.update(facts)
        self._write_manifest()

    def finish(self, name: str, *files: str, **facts: Any) -> None:
        """Notes that a phase is done, with the digests of its files."""
        phase = self._manifest.phases[name]
        phase.files = {file: digest(self.folder / file) for file in files}
        phase.done = True
        self.note(name, **facts)

    def facts(self, name: str) -> dict[str, Any]:
        """The facts of a phase that was begun."""
        return self._manifest.phases[name].facts

    def write(self, name: str, text: str) -> None:
        """Writes a file of the state directory, all of it or nothing."""
        with self.aside(name) as partial:
            partial.write_text(text, encoding="utf-8")

    @contextmanager
    def aside(self, name: str) -> Iterator[Path]:
        """Gives a path to write to that becomes the file `name` at the end, and nothing after an error."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        try:
            yield partial
            partial.replace(file)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def size(self, *names: str) -> int:
        """Bytes of those of these files that are there."""
        files = [self.folder / name for name in names]
        return sum(file.stat().st_size for file in files if file.is_file())

    def check_space(self, what: str, needed: int) -> None:
        """Refuses to begin what the disk has no room for.

        Raises:
            SettingsError: fewer than `needed` bytes are free.
        """
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise SettingsError(
                f"--output {self.folder}: there is no space for {what}: {gigabytes(needed)} are needed, and "
                f"{gigabytes(free)} are free"
            )

    def _write_manifest(self) -> None:
        self.write(MANIFEST, self._manifest.model_dump_json(indent=2) + "\n")


def _read_manifest(folder: Path) -> Manifest | None:
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except ValidationError:
        raise SettingsError(f"{file}: is damaged, or of another release; use another --output") from None
