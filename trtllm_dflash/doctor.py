"""`doctor`: what this machine has, what each absence costs, and how to get it."""

import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trtllm_dflash.errors import EngineError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.serving.triton import find_triton, remedy


@dataclass(frozen=True)
class Finding:
    """A program, library or device that the package can use: present or not, and the remedy."""

    name: str
    present: bool
    detail: str
    cost: str = ""
    remedy: str = ""


def examine() -> list[Finding]:
    """Looks for everything the package can use; changes nothing and starts nothing that lasts."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _cuda,
        _kernels,
        _tensorrt,
        _tensorrt_rtx,
        _triton,
        _gateway,
        _mpi,
        _modelopt,
        _huggingface_token,
    ]
    return [check() for check in checks]


def _python() -> Finding:
    fits = (3, 10) <= sys.version_info[:2] < (3, 14)
    return Finding(
        "Python", fits, platform.python_version(), "the package is not tested here", "install Python 3.10 to 3.13"
    )


def _torch() -> Finding:
    version = _version("torch")
    return Finding("torch", version is not None, version or "", "nothing runs", "pip install torch")


def _cuda() -> Finding:
    remedy = "an NVIDIA GPU with its driver, and a torch built for CUDA"
    if _version("torch") is None:
        return Finding("CUDA GPU", False, "", "cannot look without torch", remedy)
    import torch

    if not torch.cuda.is_available():
        driver = "nvidia-smi is there" if shutil.which("nvidia-smi") else "no nvidia-smi"
        built = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch built for CPU"
        return Finding("CUDA GPU", False, f"none ({built}; {driver})", "generation runs on the CPU", remedy)
    names = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        names.append(f"{properties.name} SM{properties.major}{properties.minor} {properties.total_memory >> 30} GiB")
    return Finding("CUDA GPU", True, "; ".join(names))


def _kernels() -> Finding:
    name = "CUDA kernels"
    if _version("torch") is None:
        return Finding(name, False, "", "cannot look without torch", "pip install torch")
    import torch

    from trtllm_dflash import kernels

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capabilities = {torch.cuda.get_device_capability(i) for i in range(gpus)}
    return find_kernels(name, {capability for capability in capabilities if capability >= kernels.OLDEST_GPU})


def find_kernels(name: str, capabilities: set[tuple[int, int]]) -> Finding:
    """Looks for our CUDA kernels, and for code in them for GPUs of these compute capabilities."""
    from trtllm_dflash import kernels

    cost = "nothing here: there is no GPU that they are for"
    if capabilities:
        cost = "on the GPU no engine in BF16 or FP16 loads without --kernels torch, which is slower"
    try:
        library = kernels.load()
        for capability in capabilities:
            kernels.load_for(capability)
    except EngineError as error:
        remedy = kernels.remedy()
        return Finding(name, False, str(error).removesuffix(f": {remedy}"), cost, remedy)
    held = ", ".join(f"SM{architecture}" for architecture in library.architectures)
    return Finding(name, True, f"{library.version} ({library.path}) for {held}")


def _tensorrt() -> Finding:
    spec = importlib.util.find_spec("tensorrt")
    return Finding(
        "TensorRT",
        spec is not None and spec.origin is not None,  # any folder named tensorrt has a spec, and no origin
        _version("tensorrt") or "",
        "no TensorRT plans for data-center GPUs (SM90, SM100, SM103)",
        "NVIDIA's TensorRT container or packages, on the machine with the GPU",
    )


def _tensorrt_rtx() -> Finding:
    return Finding(
        "TensorRT-RTX",
        importlib.util.find_spec("tensorrt_rtx") is not None,
        _version("tensorrt-rtx") or "",
        "no TensorRT plans compiled without a GPU (SM75 to SM89, SM120, SM121)",
        pip_install("tensorrt"),
    )


def _triton() -> Finding:
    cost = "no serving"
    try:
        triton = find_triton()
    except EngineError:
        return Finding("Triton server", False, "", cost, remedy())
    with tempfile.TemporaryDirectory() as folder:
        try:
            triton.prepare(Path(folder))
        except EngineError as error:
            return Finding("Triton server", False, f"{triton.origin}, which does not run here", cost, str(error))
    return Finding("Triton server", True, f"{triton.origin} ({triton.executable})")


def _gateway() -> Finding:
    found = {name: _version(name) for name in ("fastapi", "uvicorn", "tritonclient", "grpcio")}
    missing = [name for name, version in found.items() if version is None]
    detail = f"no {', '.join(missing)}" if missing else ", ".join(f"{name} {found[name]}" for name in found)
    return Finding("OpenAI gateway", not missing, detail, "no serve --openai-port", pip_install("serving"))


def _mpi() -> Finding:
    cost, remedy = "no tensor parallelism (--tp)", pip_install("tp")
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if _version("mpi4py") is None or launcher is None:
        missing = "mpi4py" if _version("mpi4py") is None else "mpiexec"
        return Finding("MPI", False, f"no {missing}", cost, remedy)
    # Probed in another process: an MPI library that does not load takes its process down.
    probe = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0])"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding("MPI", False, "mpi4py does not load within a minute", cost, remedy)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it ends without a word"]
        return Finding("MPI", False, f"mpi4py does not load: {last[0]}", cost, remedy)
    return Finding("MPI", True, f"{done.stdout.strip()[:60]} ({launcher})")


def _modelopt() -> Finding:
    version = _version("nvidia-modelopt")
    return Finding(
        "ModelOpt",
        version is not None,
        version or "",
        "no quantize command",
        pip_install("quantization"),
    )


def _huggingface_token() -> Finding:
    from huggingface_hub import get_token

    return Finding(
        "Hugging Face token",
        get_token() is not None,
        "set" if get_token() else "",
        "gated checkpoints (Llama 3.1) cannot be downloaded",
        "accept the model's licence on its page, then set HF_TOKEN or run: hf auth login",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
