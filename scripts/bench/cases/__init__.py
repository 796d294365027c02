"""Each operation at configurations of known models, to be compiled for TPUs, and the parts that are counted."""
