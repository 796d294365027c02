"""Training: state, step, loop, and what surrounds them."""
