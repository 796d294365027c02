"""The runtime of a module on a mesh: placement, precision, kernels, and the target's compiler options."""

from axon.runtime.runtime import IDENTITY_LAYERS, Runtime, flattened, nested

__all__ = ["IDENTITY_LAYERS", "Runtime", "flattened", "nested"]
