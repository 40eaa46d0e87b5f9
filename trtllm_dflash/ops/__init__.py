"""The vocabulary of operations (`base`) and what computes or emits it: torch, our CUDA kernels, TensorRT."""
