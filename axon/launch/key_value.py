"""The key-value store of a run's processes: JAX has one, without a public interface (jax 0.10.2 to 0.12)."""

import time

from jax._src import distributed
from jax.errors import JaxRuntimeError

from axon.errors import UserError

ENDED = "axon/ended/"
"""Below this key each process that fails leaves the reason."""

_ASK_SECONDS = 0.1


class ProcessesError(UserError):
    """What is wrong with several processes together; each of them reports it."""


def processes() -> tuple[int, int]:
    """The number of this process, and how many there are; (0, 1) where there is but one. Asks for no device."""
    state = distributed.global_state
    return (state.process_id or 0, state.num_processes or 1) if state.client is not None else (0, 1)


def put(key: str, value: str) -> None:
    """Set `key` for all processes; it must not be set yet."""
    distributed.global_state.client.key_value_set(key, value)  # pyright: ignore[reportOptionalMemberAccess]


def delete(key: str) -> None:
    """Delete `key`, if it is set, and all below it."""
    distributed.global_state.client.key_value_delete(key)  # pyright: ignore[reportOptionalMemberAccess]


def get(key: str) -> str | None:
    """The value of `key`; None where it is not set yet."""
    try:
        return distributed.global_state.client.key_value_try_get(key)  # pyright: ignore[reportOptionalMemberAccess]
    except JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def wait(key: str) -> str:
    """The value of `key` once it is set, without a time limit. Raises `ProcessesError` if another process fails."""
    while (value := get(key)) is None:
        check_none_ended()
        time.sleep(_ASK_SECONDS)
    return value


def check_none_ended() -> None:
    """Raise `ProcessesError` with what another process has said of its end."""
    client, mine = distributed.global_state.client, str(processes()[0])
    for key, reason in client.key_value_dir_get(ENDED):  # pyright: ignore[reportOptionalMemberAccess]
        if (index := key.rpartition("/")[2]) != mine:
            raise ProcessesError(f"process {index} ended: {reason}")
