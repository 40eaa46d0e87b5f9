"""What is published of the GPUs that engines are built for, and how much of that a decoding step gets."""

from dataclasses import dataclass

from trtllm_dflash.cost.rates import Rates
from trtllm_dflash.models.weights import Precision

_GB, _TERA = 1e9, 1e12

#: Measured on an H200: a large copy moves 4.24 of 4.8 TB/s (read and written), a large BF16 product does 683 of 989
#: TFLOP/s. Others of the kind differ by a percent or two: see the records in benchmarks/results.
COPY_SHARE = 4.24 / 4.8
GEMM_SHARE = 683 / 989


@dataclass(frozen=True)
class Published:
    """A GPU's limits, from its data sheet; of products, without sparsity."""

    bandwidth: float  # of its memory, bytes a second
    bf16: float  # and FP16, summed in FP32: operations a second; in FP8 twice as many
    fp32: float
    link: float  # to the other GPUs of its host, bytes a second each way
    nvlink: bool = True  # else PCIe

    def products(self, precision: Precision) -> float:
        """Operations a second of products in that type."""
        return self.fp32 if precision == "fp32" else self.bf16

    def achieved(self, precision: Precision) -> Rates:
        """What a large copy and a large product get, had they the shares that an H200 was measured to give."""
        return Rates(self.bandwidth * COPY_SHARE, self.products(precision) * GEMM_SHARE)


#: By the names of `cost.memory.GPUS`. Data-center GPUs are the SXM ones, of an HGX board.
PUBLISHED = {
    "b300": Published(8_000 * _GB, 2_250 * _TERA, 75 * _TERA, 900 * _GB),
    "b200": Published(8_000 * _GB, 2_250 * _TERA, 75 * _TERA, 900 * _GB),
    "h200": Published(4_800 * _GB, 989 * _TERA, 67 * _TERA, 450 * _GB),
    "h100": Published(3_350 * _GB, 989 * _TERA, 67 * _TERA, 450 * _GB),
    "rtx-pro-6000": Published(1_792 * _GB, 503.8 * _TERA, 126 * _TERA, 64 * _GB, nvlink=False),
    "rtx-5090": Published(1_792 * _GB, 209.5 * _TERA, 104.8 * _TERA, 64 * _GB, nvlink=False),
    "rtx-4090": Published(1_008 * _GB, 165.2 * _TERA, 82.6 * _TERA, 32 * _GB, nvlink=False),
    "l40s": Published(864 * _GB, 362 * _TERA, 91.6 * _TERA, 32 * _GB, nvlink=False),
}
