"""Many processes: which of them this one is, starting them on one machine, and what they have to agree on."""
