"""Groups of commands, one module each: `axon checkpoint …`."""
