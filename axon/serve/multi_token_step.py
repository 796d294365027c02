"""The programs of a model's own multi-token block, which runs beside the steps of an engine."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.errors import UserError
from axon.nn import CacheSpec, LanguageModel
from axon.serve.pages import PagePool
from axon.serve.step import Step, StepInputs, check_guesses, logits_of, model_inputs, pool_specs, window_of

WHOLE = PartitionSpec(None, None)


class MultiTokenStep:
    """Three programs, to be called or traced within `Step.tracing`: `forward`, a step that keeps all its hidden states;
    `mtp`, the block over these; `guess`, the logits of some of its rows. Their docstrings are `Step.computed`'s, and
    those of `_ahead` and `_guess`.

    Args:
        step: of the model, whose windows have pools.

    Raises `UserError` for a model without the block, and for a block whose window no layer has.
    """

    def __init__(self, step: Step):
        module = step.runtime.module
        if not module.has_mtp:
            raise UserError(
                "the model has no block that predicts the token after the next, as DeepSeek and Qwen3Next with "
                "multi_token = True have, and cannot guess with it; --draft ngram needs none"
            )
        with step.tracing():
            check_guesses("MultiToken", [module.mtp.block.cache_specs(1, 1)])
        self.step, self.window = step, window_of(module.mtp.block)
        if self.window not in step.windows:
            raise UserError(f"the multi-token block sees {self.window} keys, and no layer does: it cannot guess here")
        self.forward = step.jit(step.computed, donate_argnames="cache")
        self.mtp = step.jit(self._mtp, donate_argnames="cache")
        self.guess = step.jit(self._guess)

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return sum(program._cache_size() for program in (self.forward, self.mtp, self.guess))

    def cache_specs(self, pools: Mapping[int | None, PagePool], dtype: Any = None) -> dict[str, CacheSpec]:
        """Of the block's pages, as many as the layers have that see as far back: see `Step.cache_specs`."""
        with self.step.tracing():
            specs = self.step.runtime.module.mtp.block.cache_specs(1, 1)
        return pool_specs(specs, pools[self.window], dtype)

    def traced(self, parameters: Any, variables: Any, cache: Any, last: Any, inputs: StepInputs) -> Any:
        """`forward`, as `Step.traced`."""
        with self.step.tracing():
            return self.forward.trace(parameters, variables, cache=cache, last=last, inputs=inputs)

    def _mtp(
        self,
        parameters: Any,
        variables: Any,
        cache: Any,
        hidden: Array,
        after: Array,
        ids: Array,
        inputs: StepInputs,
    ) -> tuple[Array, Any]:
        """What the head guesses from, `rows embed`, and the block's cache, which is donated.

        `after[tokens]`: the id after each token; −1 − row where that is `ids[row]`, what was drawn of a row.
        """
        model: LanguageModel = self.step.runtime.bind(parameters, variables)
        after = jnp.where(after >= 0, after, ids[jnp.where(after >= 0, 0, -1 - after)])
        given = model_inputs(after, inputs, self.step.windows)
        hidden = axes.shard(hidden, "batch seq.residual embed")
        with axes.valid_rows(inputs.bounds[-1]):
            x, cache, _ = model.mtp_hidden(hidden, given, given.tokens, cache)
        rows = axes.shard(x, "batch seq embed")[0, inputs.rows]
        return axes.reshard(rows, WHOLE).astype(self.step.runtime.compute_dtype), cache

    def _guess(self, parameters: Any, variables: Any, rows: Array, places: Array) -> Array:
        """float32 `places vocab`, of some of the rows."""
        model: LanguageModel = self.step.runtime.bind(parameters, variables)
        return logits_of(model, axes.shard(rows[places][None], "batch seq embed"))
