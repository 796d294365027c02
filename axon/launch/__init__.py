"""Many processes: which of them this one is, starting them on one machine, and what they must agree on."""
