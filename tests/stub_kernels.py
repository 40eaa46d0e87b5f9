"""A library that names itself as the CUDA kernels do and computes nothing: for what happens before anything runs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from trtllm_dflash import kernels

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: cc")


def stub_library(folder: Path, version: int = kernels.ABI_VERSION, architectures: str = "90a-real") -> Path:
    """Compiles one into a folder; each in a folder of its own, for a process loads a path once."""
    source, library = folder / "stub.c", folder / "libdflash_kernels.so"
    source.write_text(
        f"int dflash_abi_version(void) {{ return {version}; }}\n"
        f'const char *dflash_architectures(void) {{ return "{architectures}"; }}\n'
        'const char *dflash_error_string(int error) { return "a stub"; }\n'
        "int dflash_attention(void) { return 1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    return library
