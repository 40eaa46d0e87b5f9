"""Benchmarks: what a step costs, and the least that it could cost."""
