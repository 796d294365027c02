"""Each operation that has kernels for GPUs at configurations to be compiled for an H200."""
