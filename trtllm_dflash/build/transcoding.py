"""The error that NVFP4 would bring to experts in INT4, whose numbers it does not have."""

import math
from itertools import islice

from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.checkpoint.quantized import read_matrix
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops.nvfp4 import rounded_to_nvfp4

#: Matrices that are rounded to see what rounding costs: an expert's three, of so many experts.
_MATRICES = 12


def check_transcoding(pair: Pair, settings: BuildSettings) -> None:
    """Refuse NVFP4 of a target whose experts are in INT4, and say how far from them it would be.

    Raises:
        SettingsError: names the flag and the relative error.
    """
    if settings.precision == "nvfp4" and pair.target_config.linear_precision is WeightPrecision.INT4:
        raise SettingsError(
            "--precision nvfp4: the target's experts are int4, whose numbers NVFP4 does not have: rounded, they would "
            f"have a relative error of {nvfp4_error(pair):.1%} (root mean square, of the first {_MATRICES} matrices at "
            "most); leave it out"
        )


def nvfp4_error(pair: Pair) -> float:
    """Relative error, root mean square, of a target's first matrices in few bits once they are rounded to NVFP4."""
    moved = whole = 0.0
    for name, matrix in islice(pair.quantized.items(), _MATRICES):
        rows = pair.target_folder.tensors[name].shape[0]
        stored = read_matrix(pair.target_folder, name, matrix, rows, None, 0, rows)
        numbers = stored.dequantize()
        moved += float((rounded_to_nvfp4(numbers) - numbers).square().sum())
        whole += float(numbers.square().sum())
    return math.sqrt(moved / whole)
