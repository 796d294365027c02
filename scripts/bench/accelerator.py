"""`scripts/accelerator_check`: is a GPU or TPU right, and how fast is it, on a machine with little more than JAX.

Each part runs in a process of its own, which ends at a limit of time: one that hangs or fails leaves the others.

numerics: one training step on the accelerator against the same step on the CPU, in float32 and in bfloat16.
attention: forward and backward, against its formula, for every kind of mask and whatever its kernel may be given.
recipes: on a GPU, one training step by each recipe of 8 bits against the same one emulated, then tokens/s beside
bfloat16's.
speed: tokens/s and MFU of the reference shape and of a 1B Llama in bfloat16; torch: `torch.compile`'s, if it is there.
our_…: on a GPU, our Hopper kernels against their formula; of attention, beside cuDNN's; of grouped matmul, beside
`ragged_dot` and a dense product; of paged attention, beside XLA's and a copy; of the quantised product, beside XLA's
and bfloat16's.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import TimeoutError as TooLong
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from axon.axes import Execution
from axon.launch.host import has_accelerator
from models.llama import Llama
from scripts.bench import gpu_attention, gpu_grouped_matmul, gpu_paged, gpu_quantized, recipes, reference
from scripts.bench.attention import attention_lines, check_attention
from scripts.bench.numerics import Compute, difference_lines, first_step, judged
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
SMALL_CASES = {"small": Case(SMALL, (2,), 32), "small tied": Case(replace(SMALL, tied=True), (2,), 32)}

Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What is checked in one process: `find`, from the options; its table's `lines`; and whether all is `right`."""

    find: Callable[[argparse.Namespace], Found]
    lines: Callable[[Found], Sequence[str]]
    right: Callable[[Found], bool] = lambda found: True
    platforms: tuple[str, ...] = ("gpu", "tpu", "cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 if all that ran is right, else 1; 2 where there is no accelerator to check."""
    options = _options(arguments)
    device = elsewhere(_device, options) if options.small or has_accelerator() else "there is none"
    if isinstance(device, str) or (device["platform"] == "cpu" and not options.small):
        print(_absent(options.platform), file=sys.stderr)
        return 2
    result = dict(device)
    print(f"{result['device']} ({result['platform']}), jax {result['jax']}")
    right = True
    for name in options.only or [name for name, part in PARTS.items() if result["platform"] in part.platforms]:
        progress(name)
        found = elsewhere(PARTS[name].find, options)
        unfinished = isinstance(found, str)
        right = right and not unfinished and PARTS[name].right(found)
        result[name] = {"unfinished": found} if unfinished else found
        print("\n" + table(name, result[name]), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if right else 1


def table(name: str, found: Found) -> str:
    """What a part found, as text."""
    return f"{name}: {found['unfinished']}" if "unfinished" in found else "\n".join(PARTS[name].lines(found))


# ---- the parts -------------------------------------------------------------------------------------------------------


def find_numerics(options: argparse.Namespace) -> Found:
    """For each compute dtype: the difference from the CPU's float32, the tolerance, and if it is within."""
    device = _first(options)
    model, batch, seq = (SMALL, 2, 32) if options.small else (reference.MODEL, reference.BATCH, reference.SEQ)
    progress("numerics: the CPU's step")
    exact = first_step(model, batch, seq, jax.devices("cpu")[0], "float32", 0)
    found = {}
    for compute, tolerance in TOLERANCES.items():
        progress(f"numerics: {compute} on {device.device_kind}")
        found[compute] = judged(first_step(model, batch, seq, device, compute, 0), exact, tolerance)
    return found


def find_attention(options: argparse.Namespace) -> Found:
    """Attention as it is chosen here, against its formula."""
    return check_attention(_first(options), options.small)


def find_recipes(options: argparse.Namespace) -> Found:
    """Each recipe's step: its difference from the emulated one, and tokens/s."""
    return recipes.check(_first(options), options.rounds)


def find_speed(options: argparse.Namespace) -> Found:
    """For each case: tokens/s, MFU and memory."""
    device, cases = _first(options), SMALL_CASES if options.small else CASES
    found = {}
    for name, case in cases.items():
        progress(f"speed: {name}")
        speed = axon_speed(case.model, case.execution, case.batches, case.seq, device, options.rounds)
        found[name] = speed | {"seq": case.seq}
    return found


def speed_lines(found: Found) -> list[str]:
    """The findings of `find_speed`, as lines of a table."""
    lines = [f"{'bfloat16 training step':32}{'batch':>10}{'tokens/s':>12}{'MFU':>13}"]
    for name, one in found.items():
        share = "–" if one["mfu"] is None else f"{100 * one['mfu']:.1f} %"
        lines.append(f"{name:32}{one['batch']:10}{one['tokens_per_second']:12,.0f}{share:>13}")
    return lines


def find_torch(options: argparse.Namespace) -> Found:
    """For each case: tokens/s of `torch.compile`, or that there is no torch here."""
    if find_spec("torch") is None:
        return {"unfinished": "torch is not installed"}
    cases = SMALL_CASES if options.small else CASES
    return {name: torch_speed(case.model, case.batches, case.seq, options.rounds) for name, case in cases.items()}


def torch_lines(found: Found) -> list[str]:
    """The findings of `find_torch`, as lines of a table."""
    lines = [f"{'torch.compile, bfloat16':32}{'batch':>10}{'tokens/s':>12}"]
    return [*lines, *(f"{name:32}{one['batch']:10}{one['tokens_per_second']:12,.0f}" for name, one in found.items())]


def find_of_kernel(check: Callable[[Any], Found], options: argparse.Namespace) -> Found:
    """What the `check` of a kernel of ours finds."""
    return check(_first(options))


def _within(found: Mapping[str, Mapping[str, Any]]) -> bool:
    return all("unavailable" in one or one["within"] for one in found.values())


def _of_kernel(module: ModuleType) -> Part:
    return Part(partial(find_of_kernel, module.check), lambda found: [module.table(found)], platforms=("gpu",))


PARTS = {
    "numerics": Part(find_numerics, lambda found: difference_lines("numerics, against CPU float32", found), _within),
    "attention": Part(find_attention, lambda found: attention_lines("attention, against its formula", found), _within),
    "speed": Part(find_speed, speed_lines),
    "recipes": Part(find_recipes, recipes.lines, lambda found: _within(found["errors"]), ("gpu",)),
    "torch": Part(find_torch, torch_lines, platforms=("gpu", "cpu")),
    "our_attention": _of_kernel(gpu_attention),
    "our_grouped_matmul": _of_kernel(gpu_grouped_matmul),
    "our_paged_attention": _of_kernel(gpu_paged),
    "our_quantized_matmul": _of_kernel(gpu_quantized),
}


# ---- processes -------------------------------------------------------------------------------------------------------


def elsewhere(find: Callable[[argparse.Namespace], Found], options: argparse.Namespace) -> Found | str:
    """What `find` finds in a process of its own, or why there is nothing: JAX and torch do not free the GPU's memory
    until they exit, and a kernel that hangs is ended."""
    with get_context("spawn").Pool(1) as pool:  # which is terminated on the way out
        try:
            return pool.apply_async(find, (options,)).get(options.limit)
        except TooLong:
            return f"not finished in {options.limit:g} s (--limit)"
        except Exception as error:  # whatever it was, the other parts are still to be checked
            return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


def _device(options: argparse.Namespace) -> Found:
    device = _first(options)
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def _first(options: argparse.Namespace) -> Any:
    """The device to check, of the requested kind; `RuntimeError` if there is none."""
    if options.platform:
        jax.config.update("jax_platforms", {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}[options.platform])
    return jax.devices()[0]


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
    parser.add_argument("--only", action="append", choices=PARTS, help="a part to check; several may be given")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of each part, which then ends")
    parser.add_argument("--json", metavar="FILE", help="write the result there, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
