"""The operations that models are written over (`base`), and what runs them: torch, our CUDA kernels, TensorRT."""
