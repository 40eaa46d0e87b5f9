"""The wheel, with the CUDA kernels where they are built and for any machine where they are not; and the sdist."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed")

from hatch_build import NAME, platform_tag
from tests.stub_kernels import needs_cc, stub_library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PACKED = f"trtllm_dflash/kernels/{NAME}"


@pytest.fixture
def source(tmp_path):
    """What a wheel is made of, without the tiny pair's weights."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("trtllm_dflash", "build_configs", "triton_repo"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "pairs", NAME))
    shutil.copytree(ROOT / "plugins" / "include", folder / "plugins" / "include")
    return folder


def built(source: Path) -> Path:
    """The folder where `make kernels` builds."""
    folder = source / "plugins" / "build"
    folder.mkdir()
    return folder


def build(source: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    return subprocess.run(command, cwd=source, capture_output=True, text=True)


def made(source: Path) -> Path:
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


@needs_cc
def test_kernels_that_are_built_are_packed_and_found_where_the_wheel_is_installed(source, tmp_path):
    library = stub_library(built(source))
    done = build(source)
    assert "packed with the CUDA kernels" in done.stdout + done.stderr
    wheel = made(source)
    assert wheel.name.endswith(f"-py3-none-{platform_tag(library.read_bytes())}.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)  # as pip does with a wheel's packages
    environment = {name: value for name, value in os.environ.items() if name != "TRTLLM_DFLASH_KERNELS"}
    command = [sys.executable, "-c", "from trtllm_dflash import kernels; print(kernels.load().path)"]
    found = subprocess.check_output(command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(installed)}, text=True)
    assert Path(found.strip()) == installed / PACKED
    assert (installed / PACKED).read_bytes() == library.read_bytes()


@needs_cc
def test_kernels_of_another_interface_are_not_packed(source):
    stub_library(built(source), version=1)
    done = build(source)
    assert done.returncode != 0
    assert "has interface 1, not" in done.stderr and "make kernels" in done.stderr


def test_without_kernels_the_wheel_is_for_any_machine_and_its_making_says_so(source):
    done = build(source)
    assert "packed without CUDA kernels" in done.stdout + done.stderr
    wheel = made(source)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert PACKED not in zipfile.ZipFile(wheel).namelist()


def test_a_wheel_needs_the_newest_glibc_that_a_symbol_of_the_library_has():
    assert platform_tag(b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.2.5\0").startswith("manylinux_2_34_")


#: What a checkout alone has a use for.
OF_GIT = {".ci", ".dockerignore", ".gitignore"}


def test_a_source_distribution_has_all_files_that_git_keeps(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    # Packed without compression, of which the pairs' weights would take six seconds.
    stored = "import gzip, functools; gzip.GzipFile = functools.partial(gzip.GzipFile, compresslevel=0)"
    command = [sys.executable, "-c", f"{stored}; from hatchling.cli import hatchling; hatchling()", "build"]
    subprocess.run([*command, "--target", "sdist", "--directory", tmp_path], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    kept = {name for name in listed.stdout.splitlines() if name.partition("/")[0] not in OF_GIT}
    assert not kept - names
