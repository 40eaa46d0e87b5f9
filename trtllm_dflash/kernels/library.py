"""The kernels' library: finding, loading and calling it."""

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trtllm_dflash.errors import EngineError

#: Names the library, where it is another than the one that belongs to this package.
LIBRARY_VARIABLE = "TRTLLM_DFLASH_KERNELS"
#: The interface of `dflash_kernels.h` that the structures here are written for.
ABI_VERSION = 42
#: Of one all-reduce, as `dflash_kernels.h` has them.
MOST_RANKS = 8
#: Tensors whose rows are joined at once, as it has them too.
MOST_JOINED = 8

Pointer = ctypes.c_void_p

_NAME = "libdflash_kernels.so"
_CHECKOUT = Path(__file__).parents[2]
#: Where a wheel and a checkout have it: beside this file, as `make wheel` packs it; where `make kernels` builds it.
PLACES = (Path(__file__).with_name(_NAME), _CHECKOUT / "plugins" / "build" / _NAME)


@dataclass(frozen=True)
class Library:
    """The kernels' library, loaded."""

    path: Path
    version: int  # of its interface
    architectures: tuple[str, ...]  # that it has code for, as CMake names them: 90a-real, 120
    functions: ctypes.CDLL = field(repr=False, compare=False)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it has code for a GPU of this compute capability."""
        return any(_runs_on(architecture, capability) for architecture in self.architectures)

    def __str__(self) -> str:
        return f"our CUDA kernels {self.version}"


def structure(name: str, **fields: str) -> type[ctypes.Structure]:
    """Makes a structure of `dflash_kernels.h`: its members by type, in its order."""
    types = {
        "ints": ctypes.c_int32,
        "floats": ctypes.c_float,
        "pointers": Pointer,
        "longs": ctypes.c_int64,
        "by_rank": Pointer * MOST_RANKS,
        "by_part": Pointer * MOST_JOINED,
    }
    members = [(member, types[kind.rstrip("_")]) for kind, names in fields.items() for member in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


def find(places: Sequence[Path] = PLACES) -> Path | None:
    """Finds the library's file: the one that TRTLLM_DFLASH_KERNELS names, else the first of `places` that has one."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return Path(named) if named else next((place for place in places if place.is_file()), None)


def load() -> Library:
    """Loads the library that `find` finds, once.

    Raises:
        EngineError: there is none, or it is of another version; says how to get it.
    """
    return _load(os.environ.get(LIBRARY_VARIABLE))


def load_for(capability: tuple[int, int]) -> Library:
    """Loads the library for a GPU of this compute capability. Errors as in `load`, or where it has no code for it."""
    library = load()
    if not library.runs_on(capability):
        held = ", ".join(library.architectures)
        raise EngineError(
            f"the CUDA kernels of {library.path} are for {held}, not for SM{capability[0]}{capability[1]}: {remedy()}"
        )
    return library


@functools.cache  # by what the environment says: files are not looked for at every launch
def _load(named: str | None) -> Library:
    path = find()
    if path is None:
        raise EngineError(f"there are no CUDA kernels: {remedy()}")
    if not path.is_file():
        raise EngineError(f"{LIBRARY_VARIABLE}={path}: there is no such file: {remedy()}, and unset it")
    try:
        functions = ctypes.CDLL(str(path))
        version = functions.dflash_abi_version()
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path} is not a library of our CUDA kernels ({error}): {remedy()}") from error
    if version != ABI_VERSION:
        raise EngineError(f"the CUDA kernels of {path} have interface {version}, not {ABI_VERSION}: {remedy()}")
    functions.dflash_architectures.restype = ctypes.c_char_p
    functions.dflash_error_string.restype = ctypes.c_char_p
    return Library(path, version, tuple(functions.dflash_architectures().decode().split(",")), functions)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU, and the library has code for its own instructions."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return any(architecture.startswith("90a") for architecture in load().architectures)


@functools.cache
def processors(device: torch.device) -> int:
    """Counts a GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def remedy() -> str:
    """Explains how to get a library that belongs to this package."""
    if (_CHECKOUT / "plugins" / "CMakeLists.txt").is_file():
        return "run `make kernels`"
    return "install a wheel that has them, as `make wheel` makes in a checkout where nvcc is"


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for one of CMake's architectures runs on a GPU: 90a-real on 9.0 alone, 100-real on 10.0 and 10.3."""
    number, _, kind = architecture.partition("-")
    digits = number.rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    if number.endswith("a"):
        return capability == (major, minor)
    if kind == "real" or number.endswith("f"):
        return capability[0] == major and capability[1] >= minor
    return capability >= (major, minor)  # as PTX it is compiled for whatever is newer


def run(name: str, params: ctypes.Structure, *rest: object) -> None:
    """Calls a function of the library on its structure.

    Raises:
        EngineError: it failed, with CUDA's words.
    """
    functions = load().functions
    error = getattr(functions, name)(ctypes.byref(params), *rest)
    if error:
        raise EngineError(f"{name}: {functions.dflash_error_string(error).decode()}")


def run_with_workspace(name: str, params: ctypes.Structure, device: torch.device) -> None:
    """Calls a function of the library on its structure, with as much scratch as NAME_workspace asks for.

    Raises:
        EngineError: it failed, with CUDA's words.
    """
    needed = ctypes.c_size_t()
    run(name + "_workspace", params, ctypes.byref(needed))
    workspace = torch.empty(needed.value, dtype=torch.uint8, device=device)
    run(name, params, Pointer(workspace.data_ptr()), needed, stream())


def stream() -> ctypes.c_void_p:
    """Wraps torch's current stream as the library takes it."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
