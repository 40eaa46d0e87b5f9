"""What Triton loads; the model is in the package."""

from trtllm_dflash.serving.collector import uncollected

with uncollected():
    from trtllm_dflash.serving.engine_model import EngineModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
