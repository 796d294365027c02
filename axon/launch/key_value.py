"""The key-value store of a run's processes: JAX has one, without a public interface (jax 0.10.2 to 0.12)."""

from jax._src import distributed


def put(key: str, value: str) -> None:
    """Set `key` for all processes; it must not be set yet."""
    distributed.global_state.client.key_value_set(key, value)  # pyright: ignore[reportOptionalMemberAccess]


def get(key: str) -> str:
    """The value of `key`. Raises `jax.errors.JaxRuntimeError` with NOT_FOUND where it is not set yet."""
    return distributed.global_state.client.key_value_try_get(key)  # pyright: ignore[reportOptionalMemberAccess]
