"""`scripts/accelerator_check`: is a GPU or TPU right, and how fast is it, on a machine with little more than JAX.

Numerics: one training step on the accelerator against the same step on the CPU, in float32 and in bfloat16; and
attention, forward and backward, against its formula, for every kind of mask and whatever its kernel may be given.
Speed: tokens/s and MFU of the reference shape and of a 1B Llama in bfloat16; if torch is installed, `torch.compile`'s.
On a GPU, last: our Hopper kernels, against their formula; of attention, beside cuDNN's; of grouped matmul, beside
`ragged_dot` and a dense product; of paged attention, beside XLA's and a copy; of the quantised product, beside XLA's
and bfloat16's.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax

from axon.axes import Execution
from axon.launch.host import has_accelerator
from models.llama import Llama
from scripts.bench import gpu_attention, gpu_grouped_matmul, gpu_paged, gpu_quantized, reference
from scripts.bench.attention import attention_lines, check_attention
from scripts.bench.numerics import Compute, difference, first_step
from scripts.bench.speed import axon_speed, torch_speed
from scripts.bench.timing import progress

TOLERANCES: Mapping[Compute, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest relative difference of a loss or a gradient norm. Functions such as exp differ by some float32 units in the
last place between devices; bfloat16 rounds each matmul operand to 2^-9 relative, and the errors of a parameter's
gradient add up over depth."""


@dataclass(frozen=True)
class Case:
    """A model whose speed is measured; of `batches`, the first that fits in memory."""

    model: Llama
    batches: tuple[int, ...]
    seq: int
    execution: Execution = Execution()


CASES = {
    "reference": Case(reference.MODEL, (512, 128, 32, 8), reference.SEQ),
    "llama3.2-1b": Case(reference.LLAMA32_1B, (16, 8, 4, 2, 1), 4096, Execution(remat="minimal")),
}
SMALL = replace(reference.MODEL, vocab=128, embed=32, layers=2, heads=4, kv_heads=2, mlp=64)
OUR_KERNELS = {
    "our_attention": gpu_attention,
    "our_grouped_matmul": gpu_grouped_matmul,
    "our_paged_attention": gpu_paged,
    "our_quantized_matmul": gpu_quantized,
}
"""For GPUs: each operation's own kernels against their formula, then their speed."""
SMALL_CASES = {"small": Case(SMALL, (2,), 32), "small tied": Case(replace(SMALL, tied=True), (2,), 32)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 if the numerics are within tolerance, else 1; 2 where there is no accelerator to check."""
    options = _options(arguments)
    if not (options.small or (has_accelerator() and _elsewhere(_runs_on_one, options.platform))):
        print(_absent(options.platform), file=sys.stderr)
        return 2
    _choose(options.platform)
    cases = SMALL_CASES if options.small else CASES
    torch = {name: _torch(case, options) for name, case in cases.items()}
    device = jax.devices()[0]
    result = {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "numerics": check_numerics(SMALL if options.small else reference.MODEL, device, options.small),
        "attention": _attention(device, options.small),
        "speed": {name: _speed(name, case, device, options.rounds) | torch[name] for name, case in cases.items()},
    }
    print(table(result))
    _write(result, options.json)
    if device.platform == "gpu":  # last: a kernel that hangs leaves what is above
        for name, part in OUR_KERNELS.items():
            result[name] = part.check(device)
            print("\n" + part.table(result[name]))
            _write(result, options.json)
    return 0 if all(one["within"] for part in ("numerics", "attention") for one in result[part].values()) else 1


def check_numerics(model: Llama, device: Any, small: bool, seed: int = 0) -> dict[str, Any]:
    """For each compute dtype: the difference of `device` from the CPU's float32, the tolerance, and if it is within."""
    batch, seq = (2, 32) if small else (reference.BATCH, reference.SEQ)
    progress("numerics: the CPU's step")
    exact = first_step(model, batch, seq, jax.devices("cpu")[0], "float32", seed)
    results = {}
    for compute, tolerance in TOLERANCES.items():
        progress(f"numerics: {compute} on {device.device_kind}")
        off = difference(first_step(model, batch, seq, device, compute, seed), exact)
        worst = max(off[name] for name in ("loss", "grad_norm", "parameter_grad_norm"))
        results[compute] = off | {"tolerance": tolerance, "within": worst <= tolerance}
    return results


def table(result: Mapping[str, Any]) -> str:
    """The result as text."""
    lines = [f"{result['device']} ({result['platform']}), jax {result['jax']}", ""]
    lines.append(f"{'numerics, against CPU float32':32}{'loss':>10}{'grad norm':>12}{'a parameter':>13}{'allowed':>10}")
    for compute, one in result["numerics"].items():
        figures = (
            f"{one['loss']:10.1e}{one['grad_norm']:12.1e}{one['parameter_grad_norm']:13.1e}{one['tolerance']:10.1e}"
        )
        lines.append(f"{compute:32}{figures}  {'ok' if one['within'] else 'TOO FAR: ' + one['worst_parameter']}")
    lines += ["", *attention_lines("attention, against its formula", result["attention"])]
    lines += ["", f"{'bfloat16 training step':32}{'batch':>10}{'tokens/s':>12}{'MFU':>13}{'torch.compile':>16}"]
    for name, one in result["speed"].items():
        share = "–" if one["mfu"] is None else f"{100 * one['mfu']:.1f} %"
        torch = "not installed" if one["torch_compile"] is None else f"{one['torch_compile']['tokens_per_second']:,.0f}"
        lines.append(f"{name:32}{one['batch']:10}{one['tokens_per_second']:12,.0f}{share:>13}{torch:>16}")
    return "\n".join(lines)


def _attention(device: Any, small: bool) -> dict[str, Any]:
    progress(f"attention on {device.device_kind}")
    return check_attention(device, small)


def _write(result: Mapping[str, Any], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


def _speed(name: str, case: Case, device: Any, rounds: int) -> dict[str, Any]:
    progress(f"speed: {name}")
    return axon_speed(case.model, case.execution, case.batches, case.seq, device, rounds) | {"seq": case.seq}


def _torch(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    if options.platform == "tpu" or find_spec("torch") is None:
        return {"torch_compile": None}
    progress("speed: torch.compile")
    return {"torch_compile": _elsewhere(torch_speed, case.model, case.batches, case.seq, options.rounds)}


def _elsewhere(fn: Callable[..., Any], *arguments: Any) -> Any:
    """`fn(*arguments)` in a process of its own: JAX and torch do not free the GPU's memory until they exit."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(fn, *arguments).result()


def _choose(platform: str | None) -> None:
    if platform:
        jax.config.update("jax_platforms", {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}[platform])


def _runs_on_one(asked: str | None) -> bool:
    """Whether JAX runs on an accelerator here, of the requested kind."""
    _choose(asked)
    try:
        return jax.devices()[0].platform != "cpu"
    except RuntimeError:
        return False


def _absent(asked: str | None) -> str:
    wanted = {"gpu": "GPU", "tpu": "TPU"}.get(asked or "", "GPU or TPU")
    return (
        f"accelerator_check: JAX finds no {wanted} on this machine, and this is a check of one: on a CPU its models "
        "take hours, and more memory than most have. --small runs tiny models, to see that the check itself works"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="accelerator_check", description=__doc__, epilog="Example: %(prog)s --json h200.json"
    )
    parser.add_argument("--platform", choices=("gpu", "tpu", "cpu"), help="what to check; JAX's own choice by default")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that the check itself works")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps, of which the median counts")
    parser.add_argument("--json", metavar="FILE", help="write the result there, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
