"""What runs a module on a mesh: placement, precision, kernels, and the target's compiler options."""

from axon.runtime.runtime import Runtime, flattened, nested

__all__ = ["Runtime", "flattened", "nested"]
