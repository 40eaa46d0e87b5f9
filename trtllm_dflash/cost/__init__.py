"""The cost of steps and engines: GPUs, model shapes, bytes and operations counted, rates, predictions, acceptance."""
