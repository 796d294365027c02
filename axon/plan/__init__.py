"""What a traced and a compiled program says: memory, collectives, FLOPs; and compiling for what is not here."""
