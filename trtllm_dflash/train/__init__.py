"""Training of a drafter for one's own target, on features of the engine that will serve the two."""
