"""Model families, one file each: a config dataclass that builds the module."""
