"""The GPUs that engines are built for, as published, and how much of that a decoding step gets."""

from dataclasses import dataclass

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models.weights import Precision

GB = 1_000_000_000
_TERA = 1e12

#: Bytes that the driver and CUDA's context take, and what fragmentation loses.
RESERVED = 2 * GB

#: Measured on an H200: a large copy moves 4.24 of 4.8 TB/s (read and written), and a large BF16 product does 683 of 989
#: TFLOP/s. Others of the kind differ by a percent or two: see the records in benchmarks/results.
COPY_SHARE = 4.24 / 4.8
GEMM_SHARE = 683 / 989


@dataclass(frozen=True)
class Rates:
    """The best bandwidth and arithmetic that a device was measured to reach."""

    copy: float  # bytes read and written a second, copying within the device's memory
    gemm: float  # floating-point operations a second, in one large matrix product of the engine's type


@dataclass(frozen=True)
class GPU:
    """A GPU: its memory, and the compute capability that decides on kernels."""

    name: str
    memory: int  # GB, as in its data sheet
    capability: int  # 89: compute capability 8.9

    @property
    def bytes(self) -> int:
        """All of its memory, in bytes."""
        return self.memory * GB

    @property
    def usable_bytes(self) -> int:
        """Memory that weights, caches and activations may take, in bytes."""
        return self.bytes - RESERVED

    @property
    def datacenter_blackwell(self) -> bool:
        """Whether it is SM100 or SM103, for which there are kernels that other Blackwell GPUs lack."""
        return self.capability in (100, 103)

    @property
    def hopper(self) -> bool:
        """Whether it is SM90."""
        return self.capability == 90


@dataclass(frozen=True)
class PublishedGPU(GPU):
    """A GPU with its limits, from its data sheet; of products, without sparsity."""

    bandwidth: float  # of its memory, bytes a second
    bf16: float  # and FP16, summed in FP32: operations a second; in FP8 twice as many
    fp32: float
    link: float  # to the other GPUs of its host, bytes a second each way
    nvlink: bool = True  # else PCIe
    measured_on: str = "H200"  # the GPU that these shares are of
    copy_share: float = COPY_SHARE
    gemm_share: float = GEMM_SHARE

    def products(self, precision: Precision) -> float:
        """Published operations a second of matrix products in that type."""
        return self.fp32 if precision == "fp32" else self.bf16

    def achieved(self, precision: Precision) -> Rates:
        """Expected rates of a large copy and a large product: the published limits, times the measured shares."""
        return Rates(self.bandwidth * self.copy_share, self.products(precision) * self.gemm_share)


#: By the name that `--gpu` takes. Data-center GPUs are the SXM ones, of an HGX board.
GPUS = {
    gpu.name: gpu
    for gpu in (
        PublishedGPU("b300", 288, 103, 8_000 * GB, 2_250 * _TERA, 75 * _TERA, 900 * GB),
        PublishedGPU("b200", 192, 100, 8_000 * GB, 2_250 * _TERA, 75 * _TERA, 900 * GB),
        PublishedGPU("h200", 141, 90, 4_800 * GB, 989 * _TERA, 67 * _TERA, 450 * GB),
        PublishedGPU(
            *("h100", 80, 90, 3_350 * GB, 989 * _TERA, 67 * _TERA, 450 * GB),
            measured_on="H100",
            copy_share=3.005 / 3.35,
            gemm_share=715 / 989,
        ),
        PublishedGPU("rtx-pro-6000", 96, 120, 1_792 * GB, 503.8 * _TERA, 126 * _TERA, 64 * GB, nvlink=False),
        PublishedGPU("rtx-5090", 32, 120, 1_792 * GB, 209.5 * _TERA, 104.8 * _TERA, 64 * GB, nvlink=False),
        PublishedGPU("rtx-4090", 24, 89, 1_008 * GB, 165.2 * _TERA, 82.6 * _TERA, 32 * GB, nvlink=False),
        PublishedGPU("l40s", 48, 89, 864 * GB, 362 * _TERA, 91.6 * _TERA, 32 * GB, nvlink=False),
    )
}


def find_gpu(name: str) -> PublishedGPU:
    """Looks up a GPU by its name.

    Raises:
        SettingsError: it is not known.
    """
    if name.lower() not in GPUS:
        raise SettingsError(f"--gpu {name} is not known; known: {', '.join(GPUS)}")
    return GPUS[name.lower()]


def capability(name: str) -> int:
    """Looks up the compute capability of a GPU by its name, such as 89; `sm89` stands for itself.

    Raises:
        SettingsError: the name is not known.
    """
    lower = name.lower()
    if lower.startswith("sm") and lower[2:].isdigit():
        return int(lower[2:])
    try:
        return find_gpu(name).capability
    except SettingsError as error:
        raise SettingsError(f"{error}, or a compute capability such as sm89") from None


def present_gpu() -> GPU | None:
    """Finds the GPU that this process computes on; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return GPU(found.name.replace(" ", "-").lower(), found.total_memory // GB, 10 * found.major + found.minor)


def gigabytes(count: int) -> str:
    """Formats a number of bytes: `12.3 GB`."""
    return f"{count / GB:.1f} GB"
