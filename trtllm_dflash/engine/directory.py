"""An engine directory: written aside and renamed, checked when loaded."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from trtllm_dflash.engine.config import SCHEMA_VERSION, EngineConfig
from trtllm_dflash.errors import EngineError
from trtllm_dflash.models import FAMILIES
from trtllm_dflash.models.weights import units_per_rank
from trtllm_dflash.signals import holding_signals

if TYPE_CHECKING:  # seconds of a process that computes nothing
    import torch

CONFIG_FILE = "config.json"

#: The checkpoints' own configurations, as they were: what an export of the pair is written with.
TARGET_CONFIG_FILE, DRAFTER_CONFIG_FILE = "target_config.json", "drafter_config.json"
#: The library of the TensorRT plugin that an engine's plans run.
PLUGIN_FILE = "libdflash_plugin.so"


def digest(path: Path) -> str:
    """Computes the SHA-256 of a file, in hexadecimal."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def weights_file(rank: int) -> str:
    """Names the file of a rank's tensors."""
    return f"rank{rank}.safetensors"


def plan_file(rank: int) -> str:
    """Names the file of a rank's TensorRT plan."""
    return f"rank{rank}.engine"


def rank_files(path: Path, config: EngineConfig) -> list[Path]:
    """Lists the files of an engine's ranks: TensorRT plans, or tensors."""
    name = plan_file if config.backend == "tensorrt" else weights_file
    return [path / name(rank) for rank in range(config.tp)]


@contextmanager
def written_aside(path: Path, what: str = "engine", *, replaces: bool, knob: str = "--output") -> Iterator[Path]:
    """Makes a folder to write into that becomes `path` at the end; after an error or Ctrl-C nothing is left of it.

    Where `path` is a link, what it leads to is written. What a process that was killed has left goes when the next one
    writes to the same path.

    Args:
        replaces: what stands at `path` by then goes; else only an empty folder does.
        knob: that says where `path` is, for errors.

    Raises:
        EngineError: it cannot be written; or without `replaces`, another process has made it meanwhile.
    """
    named, here = Path(os.path.abspath(path)), _current_folder()  # "." has no name
    path = Path(os.path.realpath(path))  # a link would be replaced, and what it leads to would stay as it was
    if path.is_mount():
        raise EngineError(f"{named}: is a mount, which nothing can take the place of; name a folder in it ({knob})")
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    for place in {named, path}:
        _remove_abandoned(place)
    lock = None
    try:
        aside.mkdir(parents=True)
        lock = os.open(aside, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: there nobody removes what is left
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield aside
        if replaces and path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(old)
            try:
                aside.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            _rename_to_new(aside, path, named, what)
        if here is not None and path in (
            here,
            *here.parents,
        ):  # we stay in the folder that went, where no relative path leads anywhere
            os.chdir(here if here.is_dir() else path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EngineError(f"{named}: the {what} cannot be written: {reason} ({knob})") from error
    finally:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(aside, ignore_errors=True)


def stands(output: Path) -> bool:
    """Whether something would be replaced by what is written to `output`: an empty folder is nothing."""
    return any(output.iterdir()) if output.is_dir() else output.exists()


def not_replaced(output: Path, what: str) -> EngineError:
    """Makes the error of an output where something else stands than its command's `--force` replaces.

    Args:
        what: it is, as in "no engine".
    """
    return EngineError(f"--output {output}: is {what}, which --force would replace; use another, or remove it")


def _rename_to_new(aside: Path, path: Path, named: Path, what: str) -> None:
    """Gives a folder a name that nothing has; the file system refuses it where another process was sooner."""
    try:
        aside.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise EngineError(
            f"{named}: something else was written there while this {what} was made; "
            "use another --output, or --force to replace it"
        ) from None


def _remove_abandoned(path: Path) -> None:
    """Removes folders that were written aside, or replaced, for `path` by processes that are gone.

    A process in another container has a number that nobody has here: so its folder's lock is asked for, too.
    """
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*.*"):
        pid, kind = folder.name.rsplit(".", 2)[-2:]
        # A replaced engine is the only one where its process died before the new one had its name.
        if not pid.isdecimal() or _runs(int(pid)) or not (kind == "partial" or (kind == "old" and path.exists())):
            continue
        with suppress(OSError):  # it is another user's, or locked
            if folder.is_symlink():  # of an output that was a link; what it leads to is nobody's leftover
                folder.unlink()
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def check_apart(output: Path, sources: Mapping[str, Path]) -> None:
    """Checks that a folder to write holds none of the folders that are read, which would go as it is replaced.

    Args:
        sources: by what they are.

    Raises:
        EngineError: it holds one.
    """
    for what, folder in sources.items():
        if Path(os.path.realpath(output)) in (folder.resolve(), *folder.resolve().parents):
            raise EngineError(f"{output}: holds the {what} that is read; use another --output")


def check_outside(output: Path, engine: Path, knob: str = "--output") -> None:
    """Checks that a folder to write does not lie in an engine, which is replaced as a whole.

    Args:
        knob: that says where `output` is.

    Raises:
        EngineError: it does.
    """
    if engine.resolve() in Path(os.path.realpath(output)).parents:
        raise EngineError(f"{output}: lies in the engine, and would go when that is built again; use another {knob}")


def _current_folder() -> Path | None:
    """Finds the folder that we are in; None: it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def check_replaced(output: Path, has_force: bool) -> None:
    """Checks that what would be replaced by an engine is one, too.

    Args:
        has_force: whether the command has `--force`; else it replaces engines without.

    Raises:
        EngineError: something else stands there.
    """
    if not stands(output) or is_engine(output):
        return
    if has_force:
        raise not_replaced(output, "not an engine directory")
    raise EngineError(f"{output}: is not an engine directory, which would be replaced; use another --output")


def is_engine(path: Path) -> bool:
    """Whether a directory is an engine, of any version, sound or broken."""
    config = path / CONFIG_FILE
    return any((path / name(0)).is_file() for name in (weights_file, plan_file)) or (
        config.is_file() and b'"schema_version"' in config.read_bytes()
    )


def read_config(path: Path) -> EngineConfig:
    """Reads the configuration of an engine directory.

    Raises:
        EngineError: there is none, it cannot be read, or it is of another version.
    """
    file = path / CONFIG_FILE
    try:
        if not file.is_file():
            raise EngineError(f"{path}: not an engine directory (no {CONFIG_FILE}); build one: trtllm-dflash build")
        raw = json.loads(file.read_text(encoding="utf-8"))
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version is None:
            raise EngineError(f"{file}: has no schema_version, so it is no engine's; build the engine again")
        if version != SCHEMA_VERSION:
            raise EngineError(
                f"{file}: schema version {version}, this release reads {SCHEMA_VERSION}; build the engine again"
            )
        config = EngineConfig.model_validate(raw)
        family = config.target.family
        if family not in FAMILIES:  # of a later release
            raise EngineError(f"{file}: target.family: there is no {family!r} here; build the engine again")
        for model in filter(None, (config.target, config.drafter)):
            units_per_rank(model.kv_heads, config.tp)
        return config
    except OSError as error:
        raise EngineError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError) as error:
        cause = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(str(part) for part in cause["loc"])
        raise EngineError(f"{file}: {where + ': ' if where else ''}{cause['msg']}; build the engine again") from None


def check_file(path: Path, config: EngineConfig, name: str) -> Path:
    """Checks that a file's content is what was built; returns its path.

    Raises:
        EngineError: it is missing, truncated or changed, or cannot be read.
    """
    file = path / name
    try:
        _check_there(file)
        found = digest(file)
    except OSError as error:
        raise EngineError(f"{file}: cannot be read ({error.strerror})") from None
    if found != config.files.get(name):
        raise EngineError(
            f"{file}: its digest is not the one in {CONFIG_FILE}; the file changed: build the engine again"
        )
    return file


def check_present(path: Path, config: EngineConfig) -> None:
    """Checks that all files of an engine are there, its ranks' in full length; what is in them, who loads them checks.

    Raises:
        EngineError: one is missing, or a rank's is cut short.
    """
    ranks = rank_files(path, config)
    for file in (*(path / name for name in config.files), *ranks):
        _check_there(file)
    for file, plan in zip(ranks, config.plans, strict=False):  # of other engines than TensorRT's there are none
        size = file.stat().st_size
        if size != plan.bytes:
            raise EngineError(f"{file}: has {size} bytes, and {plan.bytes} were built; build the engine again")
    for file in ranks if config.backend == "torch" else ():
        try:
            with safe_open(file, framework="numpy"):  # reads the header, which says how long the file is
                pass
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{file}: {error}; build the engine again") from None


def _check_there(file: Path) -> None:
    if not file.is_file():
        raise EngineError(f"{file}: missing; build the engine again")


def check_shared_files(path: Path, config: EngineConfig) -> None:
    """Checks the files that all ranks share: tokenizer and chat template.

    Raises:
        EngineError: one is missing, truncated or changed.
    """
    for name in config.files:
        if not name.startswith("rank"):
            check_file(path, config, name)


def load_weights(path: Path, config: EngineConfig, rank: int) -> "dict[str, torch.Tensor]":
    """Loads and checks a rank's tensors.

    Raises:
        EngineError: the file is missing or not what was built.
    """
    from safetensors.torch import load_file

    file = check_file(path, config, weights_file(rank))
    try:
        with holding_signals():  # not for long: what is read is the header
            return load_file(file)
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{file}: {error}; build the engine again") from error
