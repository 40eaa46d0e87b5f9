"""Reading checkpoints: Hugging Face folders, the drafter formats, and the slice of each tensor that a rank holds."""
