"""The choice of the kernels that compute an engine's steps."""

from typing import Literal

#: What `--kernels` takes: our CUDA kernels where they compute the model ("auto"), those that give a row the same bits
#: whatever else is in the batch ("exact"), or torch's alone.
Kernels = Literal["auto", "exact", "torch"]
