"""The accelerator's attention, forward and backward, against the formula in float32 on the same device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon import axes
from axon.errors import UserError
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Mask,
    Prefix,
    SameDocument,
    Window,
    attention_and_lse,
    attention_gradients,
    attention_part,
    attention_reference,
)
from axon.kernels.attention.reference import attention_gradients_reference
from axon.layout import Layout, Placement

TOLERANCE = 2e-2
"""Largest relative error, in the Frobenius norm. bfloat16 rounds weights and what is multiplied with them to 2^-9; a
mask that is wrong by one key of a window of 100 is off by a tenth."""


@dataclass(frozen=True)
class Problem:
    """Attention of `seq` queries that start at key `start`; with `sinks`, one for each head.

    `part`: of a part of the keys, as a ring has it, with the log-sum-exp and the output over more of them.
    """

    mask: Mask
    dtype: str = "bfloat16"
    widths: tuple[int, int] = (128, 128)
    seq: int = 512
    start: int = 0
    sinks: bool = False
    part: bool = False

    def __str__(self) -> str:
        kinds = {
            f"{self.seq} queries": self.seq != 512,
            "sinks": self.sinks,
            f"from key {self.start}": self.start,
            "a part of the keys": self.part,
        }
        width, value = self.widths
        head_dim = f"head_dim {width}" + (f" (values {value})" if value != width else "")
        return ", ".join([str(self.mask), self.dtype, head_dim, *(kind for kind, there in kinds.items() if there)])


def problems() -> list[Problem]:
    """Every kind of mask, then the rest of what a kernel may be given."""
    documents = Causal() & SameDocument()
    masks = [Everything(), Causal(), Causal() & Window(100), documents, documents & Window(100), Prefix(100)]
    masks += [Window(100), SameDocument(), Prefix(100) & SameDocument()]
    found = [Problem(mask) for mask in masks]
    found += [
        Problem(mask, widths=widths) for mask in (Causal(), documents) for widths in ((64, 64), (192, 128), (256, 256))
    ]
    found += [Problem(mask, seq=500) for mask in (Causal(), documents)]  # no multiple of a tile
    found += [Problem(mask, "float16") for mask in (Causal(), documents)]
    found += [Problem(mask, sinks=True) for mask in (Causal(), documents)]
    found += [Problem(mask, start=256) for mask in (Causal(), documents, Causal() & Window(100))]
    found += [Problem(mask, part=True) for mask in (Everything(), SameDocument(), documents)]
    return found


def check_attention(device: Any, small: bool, seed: int = 0, kernel: str | None = None) -> dict[str, dict[str, Any]]:
    """For each problem: what was chosen, its largest relative error, of which result, and whether it is within.

    `kernel`: the implementation that is requested by name; of what it cannot run, why not is what is `unavailable`.
    """
    found = [replace(one, seq=128) for one in problems()[:4]] if small else problems()
    return {str(one): _attempt(one, device, seed + n, kernel) for n, one in enumerate(found)}


def attention_lines(title: str, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The findings, as lines of a table."""
    lines = [f"{title:80}{'error':>10}{'of':>8}{'allowed':>10}"]
    for name, one in found.items():
        if "unavailable" in one:
            lines.append(f"{name:80}  {one['unavailable']}")
        else:
            verdict = "ok" if one["within"] else "TOO FAR"
            lines.append(f"{name:80}{one['error']:10.1e}{one['of']:>8}{TOLERANCE:10.1e}  {verdict}: {one['chosen']}")
    return lines


def attempt(fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `fn` finds, or why an implementation that is requested by name does not run here, or fails to."""
    try:
        return fn()
    except (UserError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return {"unavailable": str(error).strip().splitlines()[0]}


def _attempt(problem: Problem, device: Any, seed: int, kernel: str | None) -> dict[str, Any]:
    if kernel is None:
        return _checked(problem, device, seed, {})
    return attempt(lambda: _checked(problem, device, seed, {"attention": kernel}))


def _checked(problem: Problem, device: Any, seed: int, kernels: Mapping[str, str]) -> dict[str, Any]:
    placement = Placement.of(Layout(mesh={"data": 1}), [device])
    operands = jax.device_put(_drawn(problem, np.random.default_rng(seed)), device)
    with (
        axes.activate(axes.Scope(placement, execution=axes.Execution(kernels=kernels))) as scope,
        jax.default_matmul_precision("highest"),
    ):
        ours = jax.device_get(jax.jit(lambda *given: _results(problem, False, *given))(*operands))
        exact = jax.device_get(jax.jit(lambda *given: _results(problem, True, *given))(*operands))
    off = {name: _relative(ours[name], exact[name]) for name in exact}
    worst = max(off, key=lambda name: off[name])
    return {"chosen": scope.choices["attention"], "error": off[worst], "of": worst, "within": off[worst] <= TOLERANCE}


def _drawn(problem: Problem, rng: np.random.Generator) -> tuple[Any, ...]:
    """Queries, keys, values, their documents, sinks, and the cotangents of the output."""
    (width, value), keys, dtype = problem.widths, problem.seq + problem.start, jnp.dtype(problem.dtype)
    shapes = (2, problem.seq, 8, width), (2, keys, 2, width), (2, keys, 2, value), (2, problem.seq, 8, value)
    q, k, v, dout = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    documents = np.sort(rng.integers(0, 5, (2, keys)), axis=1).astype(np.int32)
    return q, k, v, documents, rng.normal(size=8).astype(np.float32), dout


def _results(
    problem: Problem, exact: bool, q: Array, k: Array, v: Array, documents: Array, sinks: Array, dout: Array
) -> dict[str, Array]:
    """Output, log-sum-exp and gradients by the kernel, or by the formula from the same operands."""
    config = AttentionConfig(problem.mask, problem.widths[0] ** -0.5)
    of_queries = documents[:, problem.start :]
    inputs = AttentionInputs((of_queries, documents), problem.start, sinks if problem.sinks else None)
    if exact:
        q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
    if problem.part:
        out, lse = (attention_reference if exact else attention_part)(q, k, v, config, inputs)
        gradients = _of_part(exact, q, k, v, config, inputs, out, lse, dout)
    else:
        attend = attention_reference if exact else attention_and_lse
        outputs = lambda q, k, v, sinks: attend(q, k, v, config, inputs._replace(sinks=sinks))  # noqa: E731
        out, backward, lse = jax.vjp(outputs, q, k, v, inputs.sinks, has_aux=True)
        gradients = backward(dout)
    names = ("q", "k", "v", "sinks")
    return {"out": out, "lse": lse} | {n: x for n, x in zip(names, gradients, strict=False) if x is not None}


def _of_part(
    exact: bool,
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    out: Array,
    lse: Array,
    dout: Array,
) -> tuple[Array, ...]:
    """Gradients as if there were other keys, with as much weight as these and opposite values."""
    out, lse = jnp.zeros_like(out), lse + jnp.log(2.0)
    rows = dout, lse, jnp.zeros(lse.shape, jnp.float32)
    if exact:
        return attention_gradients_reference(q, k, v, config, inputs, rows)
    return attention_gradients(q, k, v, config, inputs, rows, out)


def _relative(ours: Any, exact: Any) -> float:
    """The error's Frobenius norm against the exact one's; −∞ stands for queries that see no key, in both or in none."""
    finite = np.isfinite(exact)
    if not np.array_equal(np.isfinite(ours), finite):
        return float("inf")
    ours, exact = (np.where(finite, np.asarray(x, np.float64), 0) for x in (ours, exact))
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
