"""Training steps by recipes of 8 bits on an accelerator: against the same ones emulated, then beside bfloat16."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from axon.axes import Execution
from axon.precision import FP8Block, FP8Current, FP8Delayed, Int8, Recipe
from scripts.bench import reference
from scripts.bench.attention import attempt
from scripts.bench.numerics import difference_lines, first_step, judged
from scripts.bench.speed import axon_speed
from scripts.bench.timing import progress

RECIPES: Mapping[str, Recipe] = {
    "FP8Current, a tensor": FP8Current(),
    "FP8Current, a row": FP8Current(share="row"),
    "FP8Delayed": FP8Delayed(),
    "FP8Block": FP8Block(),
    "Int8": Int8(),
}
"""Those that Hopper has in hardware."""

TOLERANCE = 3e-2
"""Largest relative difference of a loss or a gradient norm: products alike, of which tensor cores keep fewer bits in
their sums; as much as bfloat16 is allowed beside float32."""

SHAPE = replace(reference.LLAMA3_8B, layers=6)
"""Six of Llama 3 8B's layers, which with AdamW's state fit in 80 GB."""

BATCHES, SEQ = (8, 4, 2, 1), 4096


def check(device: Any, rounds: int) -> dict[str, Any]:
    """For each recipe `errors`: how far a step of the reference model is from the emulated one; and `speeds`."""
    found = {name: attempt(lambda one=one: error(one, device)) for name, one in RECIPES.items()}
    kinds: Mapping[str, Recipe | None] = {"bfloat16": None, **RECIPES}
    return {
        "errors": found,
        "speeds": {n: attempt(lambda n=n: speed(n, kinds[n], device, rounds)) for n in kinds},
    }


def error(recipe: Recipe, device: Any, seed: int = 0) -> dict[str, Any]:
    """The differences of the first step by a recipe from those by the same one, emulated."""
    progress(f"recipes: {recipe.text}")
    ours, emulated = (
        first_step(reference.MODEL, reference.BATCH, reference.SEQ, device, "bfloat16", seed, one)
        for one in (recipe, replace(recipe, emulate=True))
    )
    return judged(ours, emulated, TOLERANCE)


def speed(name: str, recipe: Recipe | None, device: Any, rounds: int) -> dict[str, Any]:
    """Tokens/s by a recipe, None: in bfloat16; at the largest batch that fits."""
    progress(f"speed by recipe: {name}")
    return axon_speed(SHAPE, Execution(remat="minimal"), BATCHES, SEQ, device, rounds, recipe)


def lines(found: Mapping[str, Any]) -> list[str]:
    """The findings of `check`, as lines of a table."""
    text = [
        *difference_lines("recipes, against the same emulated", found["errors"]),
        "",
        f"{'training step':40}{'batch':>10}{'tokens/s':>12}",
    ]
    for name, one in found["speeds"].items():
        figures = one.get("unavailable") or f"{one['batch']:10}{one['tokens_per_second']:12,.0f}"
        text.append(f"{name:40}{figures}")
    return text
