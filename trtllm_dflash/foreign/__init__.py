"""The same pairs on engines that people already run: configurations of TensorRT-LLM, vLLM and SGLang."""
