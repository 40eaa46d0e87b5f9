"""What Triton loads; the model is in the package."""

from trtllm_dflash.serving.collector import uncollected

with uncollected():
    from trtllm_dflash.serving.bls_model import BLSModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
