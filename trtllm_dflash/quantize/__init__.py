"""Quantized checkpoints of a pair, with NVIDIA ModelOpt, and what they cost."""
