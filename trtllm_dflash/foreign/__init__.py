"""The engines people already run, told to draft with the same pairs: TensorRT-LLM, vLLM and SGLang."""
