"""Figures of a traced and of a compiled program: memory, collectives, FLOPs; and compiling for what is not here."""
