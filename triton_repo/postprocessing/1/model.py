"""What Triton loads; the model is in the package."""

import gc

gc.disable()  # what is imported stays: the collector need not look for garbage in it, now or later

from trtllm_dflash.serving.postprocessing_model import PostprocessingModel as TritonPythonModel  # noqa: E402

gc.freeze()
gc.enable()

__all__ = ["TritonPythonModel"]
