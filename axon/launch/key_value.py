"""The key-value store of a run's processes: JAX keeps it, and has no public name for it (jax 0.10.2 to 0.12)."""

from jax._src import distributed


def put(key: str, value: str) -> None:
    """Set `key` for all processes; it may not be set yet."""
    distributed.global_state.client.key_value_set(key, value)  # pyright: ignore[reportOptionalMemberAccess]


def get(key: str) -> str:
    """The value of `key`. Raises `jax.errors.JaxRuntimeError` with NOT_FOUND where it is not set yet."""
    return distributed.global_state.client.key_value_try_get(key)  # pyright: ignore[reportOptionalMemberAccess]
