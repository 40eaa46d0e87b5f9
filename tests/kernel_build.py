"""The CUDA kernels as the tests compile them. Needs Python alone: `make test` runs it while it sets up the environment.

python -m tests.kernel_build
"""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "plugins" / "build-tests"
#: What it needs and this machine lacks.
MISSING = [tool for tool in ("cmake", "nvcc") if shutil.which(tool) is None]

_SAID = FOLDER / "said.txt"  # by compilers that no test has listened to yet


class FailedBuild(Exception):
    """What the compilers said last."""


def build_kernels() -> str:
    """Compiles for SM90 alone; the TensorRT plugin too, where TENSORRT_INCLUDE names the headers.

    The folder stays, and CMake compiles what has changed since; where ccache is, it knows what other checkouts have
    compiled. A warning is an error of the compilers, so none is left in it.
    Code of GPUs is not optimized, for that takes three times as long; ours hardly: as far as GCC's warnings need it.
    Small files are joined: that each has the headers which it needs is seen where kernels are built to be run.

    Returns what the compilers said on standard error since a test has asked.

    Raises:
        FailedBuild: they refused something.
    """
    configure: list[str | Path] = [
        *("cmake", "-S", ROOT / "plugins", "-B", FOLDER, "-DCMAKE_CUDA_ARCHITECTURES=90-real"),
        *("-DCMAKE_CUDA_FLAGS=-Ofc=max -Xptxas=-O0", "-DCMAKE_CUDA_FLAGS_RELEASE=-O1 -DNDEBUG", "-DDFLASH_JOINED=ON"),
        f"-DTENSORRT_INCLUDE={os.environ.get('TENSORRT_INCLUDE', '')}",
    ]
    if shutil.which("ccache"):
        configure.append("-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache")
    # By paths from the checkout, which are those of another one; and by the files that CMake has nvcc list anyway.
    # MAKEFLAGS are `make test`'s own.
    ours = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", "CCACHE_DEPEND": "1", "MAKEFLAGS": ""}
    said = _SAID.read_text() if _SAID.exists() else ""
    build: list[str | Path] = ["cmake", "--build", FOLDER, "--parallel", "2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ours)
        if done.returncode:
            raise FailedBuild(done.stdout[-4000:] + done.stderr[-4000:])
    _SAID.unlink(missing_ok=True)
    return said + done.stderr


if __name__ == "__main__" and not MISSING:
    try:
        heard = build_kernels()
    except FailedBuild:
        pass  # the tests try again, and say it
    else:
        _SAID.write_text(heard)
