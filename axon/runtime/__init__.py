"""What runs a module on a mesh: placement, precision, kernels, and the target's compiler options."""
