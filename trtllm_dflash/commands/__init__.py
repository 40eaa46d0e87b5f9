"""The commands, a file each: flags to one function of the package, and what the terminal shows."""
