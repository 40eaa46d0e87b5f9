"""Sessions that run steps, with torch, captured CUDA graphs and TensorRT plans; their calls and slots."""
