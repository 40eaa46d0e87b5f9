"""What Triton loads; the model is in the package."""

from trtllm_dflash.serving.collector import uncollected

with uncollected():
    from trtllm_dflash.serving.postprocessing_model import PostprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
