"""Engine directories: configuration, digests, and the sizes that steps come in."""
