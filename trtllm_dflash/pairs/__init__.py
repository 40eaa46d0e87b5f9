"""Pairs that ship with the package, and the prompts that they were never trained on."""
