"""The choice of the kernels that compute an engine's steps."""

from typing import Literal, get_args

from trtllm_dflash.errors import SettingsError

#: What `--kernels` takes: our CUDA kernels where they compute the model ("auto"), those that give a row the same bits
#: whatever else is in the batch ("exact"), or torch's alone.
Kernels = Literal["auto", "exact", "torch"]


def check_kernels(kernels: str) -> None:
    """Checks that there are such kernels to choose, on whatever device.

    Raises:
        SettingsError: there are not; names those that there are.
    """
    known = get_args(Kernels)
    if kernels not in known:
        raise SettingsError(f"kernels {kernels!r}: choose {', '.join(known[:-1])} or {known[-1]}")
