"""What runs a step: calls and slots, and sessions over torch, captured CUDA graphs and TensorRT plans."""
