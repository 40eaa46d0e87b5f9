"""What Triton loads; the model is in the package."""

from trtllm_dflash.serving.preprocessing_model import PreprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
