"""Machines that are not here: their compilers, and what a compiled program says of itself."""
