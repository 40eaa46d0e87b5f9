"""What steps and engines cost: GPUs, model shapes, bytes and operations counted, rates, predictions, acceptance."""
