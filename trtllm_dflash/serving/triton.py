"""Triton Inference Server on this machine: finding it, and its command line and environment."""

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trtllm_dflash.errors import EngineError
from trtllm_dflash.extras import pip_install

CONTAINER = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"

#: Interfaces of Triton that no client of ours needs. They register shared memory, the Python models' own among it
#: (CVE-2025-23319), load models, and set where logs and traces go.
_SHUT_OFF = "shared-memory,model-repository,logging,trace"
#: A request would have to send this header, which no request can: the name of a header ends at its first colon.
_UNSENDABLE = "no:client"


@dataclass(frozen=True)
class Triton:
    """A tritonserver that can be started.

    Attributes:
        executable: the server itself.
        origin: container, PATH or wheel, for messages.
        wheel: the wheel's `tritonserver` folder, where it comes from one.
    """

    executable: Path
    origin: str
    wheel: Path | None = None

    def prepare(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Prepares the words of its command line, and its environment.

        Args:
            folder: an empty folder of the server's own, which must last as long as the server.

        Raises:
            EngineError: this Python cannot run models in it.
        """
        for place in (sys.prefix, __file__):
            if not is_named(Path(place)):
                raise EngineError(f"{place}: Triton's Python models import from ASCII paths alone; install elsewhere")
        # The process of a Python model takes its interpreter's prefix, and so its packages, from `python3` on PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environment = {**os.environ, "PATH": path}
        if self.wheel is not None:
            return self._prepare_wheel(self.wheel, folder, environment)
        words = [str(self.executable)]
        backends = self.executable.resolve().parents[1] / "backends"
        if backends.is_dir() and backends.parent != CONTAINER:  # the container's is the default
            words.append(f"--backend-directory={backends}")
        return words, environment

    def _prepare_wheel(
        self, wheel: Path, folder: Path, environment: dict[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Makes a backend directory of links into the wheel, with the process for this version of Python."""
        version = "{}.{}".format(*sys.version_info)
        stub = wheel / "python_backend_stubs" / version / STUB
        _check_installed()
        numpy = metadata.version("numpy")
        if int(numpy.split(".")[0]) >= 2:
            raise EngineError(
                f"Triton in nvidia-pytriton loses string tensors with numpy {numpy}: pip install 'numpy<2'"
                + (", on Python 3.12 or older" if sys.version_info >= (3, 13) else "")
            )
        if not stub.is_file():
            raise EngineError(f"nvidia-pytriton runs no Python {version} models; use Python 3.10 to 3.13")
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        for file in (stub, *(wheel / "backends" / "python").glob("*.*")):
            (backend / file.name).symlink_to(file)
        libraries = folder / "lib"
        libraries.mkdir()
        # Nothing else of the folder that libpython is in: it may hold another libstdc++, say.
        name = sysconfig.get_config_var("INSTSONAME") or ""
        python = Path(sysconfig.get_config_var("LIBDIR") or "") / name
        if ".so" in name and python.is_file():
            (libraries / name).symlink_to(python)
        search = [str(libraries), str(wheel.parents[1] / "nvidia_pytriton.libs"), environment.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, search))
        _check_libraries(self.executable, environment)
        _check_libraries(stub, environment)
        return [str(self.executable), f"--backend-directory={folder / 'backends'}"], environment


def _check_installed() -> None:
    """Checks that models, whose interpreters read no PYTHONPATH from Python 3.11 on, import this package and no other.

    Raises:
        EngineError: they import another, or none.
    """
    if sys.version_info < (3, 11):
        return
    own = Path(__file__).parents[1]
    search = f"import importlib.util as u; print(getattr(u.find_spec({own.name!r}), 'origin', None) or '')"
    words = [sys.executable, "-I", "-c", search]
    *_, found = subprocess.run(words, capture_output=True, text=True).stdout.splitlines() or [""]
    place = Path(found).parent if found else None
    if place is None or place.resolve() != own.resolve():
        raise EngineError(
            f"Triton's models import {own.name} from {place or 'nowhere'}, and this is {own}: install this one "
            f"(pip install {own.parent}), or run that one's trtllm-dflash"
        )


def is_named(place: Path) -> bool:
    """Whether Triton's Python models can open a place by its name: they encode names in ASCII, whatever the locale."""
    return os.path.abspath(place).isascii()


def shut_off() -> list[str]:
    """Makes the words of Triton's command line that refuse its dangerous interfaces to every client."""
    value = secrets.token_hex(16)
    return [
        f"--{flag}={_SHUT_OFF}:{_UNSENDABLE}={value}" for flag in ("http-restricted-api", "grpc-restricted-protocol")
    ]


def remedy() -> str:
    """Says how a machine comes to have a Triton server."""
    return f"{pip_install('serving')}, or use NVIDIA's Triton container"


def find_triton() -> Triton:
    """Finds the container's server, else the one on PATH, else the one in the nvidia-pytriton wheel.

    Raises:
        EngineError: there is none.
    """
    container = CONTAINER / "bin" / "tritonserver"
    if container.is_file():
        release = os.environ.get("TRITON_SERVER_VERSION")
        return Triton(container, f"the container's{f', {release}' if release else ''}")
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Triton(Path(on_path), "on PATH")
    spec = importlib.util.find_spec("pytriton")  # imports nothing
    if spec is not None and spec.origin is not None:
        wheel = Path(spec.origin).parent / "tritonserver"
        executable = wheel / "bin" / "tritonserver"
        if executable.is_file():
            return Triton(executable, f"nvidia-pytriton {metadata.version('nvidia-pytriton')}", wheel)
    raise EngineError(f"there is no tritonserver in {CONTAINER}, on PATH or in this Python: {remedy()}")


def _check_libraries(program: Path, environment: dict[str, str]) -> None:
    """Checks that the program's libraries are found: Debian's python3 comes without the shared library of Python."""
    # With this variable the loader lists what a program would load, and does not run it.
    listing = {**environment, "LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run([program], env=listing, capture_output=True, text=True, check=False)
    missing = [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]
    if missing:
        package = f"apt install libpython{'{}.{}'.format(*sys.version_info)}"
        advice = package if any(name.startswith("libpython") for name in missing) else "install its package"
        raise EngineError(f"Triton needs {', '.join(missing)}, which this machine does not have: {advice}")
