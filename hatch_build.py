"""Packs the CUDA kernels into the wheel, where `make kernels` has built them; without them it is for any machine."""

import ctypes
import platform
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "libdflash_kernels.so"


class KernelsHook(BuildHookInterface):
    """Adds plugins/build/libdflash_kernels.so to the package, and names what the wheel then needs of a machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds; an editable install finds the library where it is."""
        if version == "editable":
            return
        library = Path(self.root) / "plugins" / "build" / NAME
        if not library.is_file():
            self.app.display_warning("packed without CUDA kernels: `make wheel` compiles them where nvcc is")
            return
        _check_interface(library, Path(self.root) / "plugins" / "include" / "dflash_kernels.h")
        build_data["force_include"][str(library)] = f"trtllm_dflash/kernels/{NAME}"
        build_data["pure_python"] = False
        # ctypes loads it: any Python 3 will do.
        build_data["tag"] = f"py3-none-{platform_tag(library.read_bytes())}"
        self.app.display_info(f"packed with the CUDA kernels of {library}")


def _check_interface(library: Path, header: Path) -> None:
    """Refuses a library that was built before the header changed: the package would not load it."""
    found = ctypes.CDLL(str(library)).dflash_abi_version()
    (wanted,) = re.findall(r"DFLASH_ABI_VERSION (\d+)", header.read_text())
    if found != int(wanted):
        raise RuntimeError(f"{library} has interface {found}, not {wanted}: run `make kernels`, or remove it")


def platform_tag(library: bytes) -> str:
    """The platform that a library of the C library's symbols alone runs on: that version of glibc, or a later one."""
    versions = {(int(major), int(minor)) for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library)}
    major, minor = max(versions, default=(2, 17))
    return f"manylinux_{major}_{minor}_{platform.machine()}"
