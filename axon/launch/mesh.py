"""A mesh over the devices of several processes."""

import math

import jax

from axon.layout import Layout, LayoutError, first_devices


def check_mesh(layout: Layout) -> None:
    """Raise `LayoutError` unless the mesh has all devices of all processes, or as many of each."""
    processes, each, total = jax.process_count(), jax.local_device_count(), jax.device_count()
    sizes = {name: layout.mesh[name] for name in layout.order if name in layout.mesh} or {"data": 1}
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(first_devices(layout)) == known or (-1 in sizes.values() and total % known == 0):
        return
    asked = " × ".join(f"{name} {size}" for name, size in sizes.items())
    here = f"{processes} processes of {each} device{'s' * (each > 1)} each make {total}"
    raise LayoutError(
        f"Layout.mesh asks for {asked}, and {here}. Change the sizes, write -1 for one of them, or change --processes; "
        f"on CPU each process has the devices that XLA_FLAGS=--xla_force_host_platform_device_count gives it"
    )
