"""What an engine will need and do on a GPU, from its shape alone: no weights, no GPU."""
