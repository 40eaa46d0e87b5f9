"""The kernels' library: finding, loading and calling it."""

import ctypes
import functools
import os
from pathlib import Path

import torch

from trtllm_dflash.errors import EngineError

#: Names the library, where it does not lie in `plugins/build`.
LIBRARY_VARIABLE = "TRTLLM_DFLASH_KERNELS"
#: The interface of `dflash_kernels.h` that the structures here are written for.
ABI_VERSION = 7
#: Of one all-reduce, as `dflash_kernels.h` has them.
MOST_RANKS = 8

Pointer = ctypes.c_void_p

_BUILD = Path(__file__).parents[2] / "plugins" / "build" / "libdflash_kernels.so"


def structure(name: str, **fields: str) -> type[ctypes.Structure]:
    """A structure of `dflash_kernels.h`: its members by type, in its order."""
    types = {
        "ints": ctypes.c_int32,
        "floats": ctypes.c_float,
        "pointers": Pointer,
        "longs": ctypes.c_int64,
        "by_rank": Pointer * MOST_RANKS,
    }
    members = [(member, types[kind.rstrip("_")]) for kind, names in fields.items() for member in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


def load() -> ctypes.CDLL:
    """The kernels' library: what TRTLLM_DFLASH_KERNELS names, else the one built in `plugins/build`.

    Raises:
        EngineError: there is none, or it is of another version.
    """
    return _load(os.environ.get(LIBRARY_VARIABLE))


@functools.cache
def _load(named: str | None) -> ctypes.CDLL:
    path = Path(named or _BUILD)
    if not path.is_file():
        raise EngineError(f"there are no CUDA kernels at {path}: run `make kernels`, or set {LIBRARY_VARIABLE}")
    try:
        library = ctypes.CDLL(str(path))
        version = library.dflash_abi_version()
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path} is not a library of our CUDA kernels: {error}") from error
    if version != ABI_VERSION:
        raise EngineError(f"{path} has interface {version}, not {ABI_VERSION}: run `make kernels` again")
    library.dflash_error_string.restype = ctypes.c_char_p
    library.dflash_attention.argtypes = [Pointer, Pointer, ctypes.c_size_t, Pointer]
    return library


def run(name: str, params: ctypes.Structure, *rest: object) -> None:
    """Calls a function of the library on its structure.

    Raises:
        EngineError: it failed, with CUDA's words.
    """
    library = load()
    error = getattr(library, name)(ctypes.byref(params), *rest)
    if error:
        raise EngineError(f"{name}: {library.dflash_error_string(error).decode()}")


def stream() -> ctypes.c_void_p:
    """torch's current stream, as the library takes it."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
