"""Rotary frequencies in a config.json: `rope_theta` and `rope_scaling`, or both in `rope_parameters`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from axon.errors import UserError, suggest
from axon.nn.hugging_face import Converted
from axon.nn.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

NAMES = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "original",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "beta_fast": "fast",
        "beta_slow": "slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
"""`rope_type` → their name → our field."""

SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
THEIRS = ("rope_theta", "rope_scaling", "rope_parameters")


def rope_field(ours: str = "rope", theta: float = 10_000.0) -> Converted:
    """The field `ours`, a `Rope`; `theta`: that of a config.json without one."""
    return Converted(
        lambda config: {ours: read_rope(described(config, theta), config)},
        lambda model: write_rope(getattr(model, ours)),
        THEIRS,
    )


def described(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """What a config.json says of rotary frequencies, as `rope_parameters` says it."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", theta), **found}


def read_rope(described: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    """A `Rope` of what `rope_parameters` says. Raises `UserError` for a kind of scaling that there is not."""
    kind = described.get("rope_type", described.get("type", "default"))
    theta = float(described["rope_theta"])
    if config.get("partial_rotary_factor", described.get("partial_rotary_factor")) not in (None, 1.0):
        raise UserError("config.json: partial_rotary_factor is not 1, and axon.nn.Rope rotates all of a head")
    if kind == "default":
        return Rope(theta)
    if kind not in NAMES:
        raise UserError(
            f"config.json: rope_type is {kind!r}, which axon.nn.Rope has not.{suggest(kind, ['default', *NAMES])}"
        )
    given = {ours: described[theirs] for theirs, ours in NAMES[kind].items() if described.get(theirs) is not None}
    if kind == "yarn":
        given.setdefault("original", config.get("max_position_embeddings"))
    return Rope(theta, SCALINGS[kind](**given))


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    return {"rope_theta": rope.theta, "rope_scaling": write_scaling(rope)}


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """`rope_parameters`, which says both."""
    return {"rope_type": "default", **(write_scaling(rope) or {}), "rope_theta": rope.theta}


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """`rope_scaling`; None for none."""
    if rope.scaling is None:
        return None
    kind = next(name for name, scaling in SCALINGS.items() if isinstance(rope.scaling, scaling))
    defaults = {field.name: field.default for field in fields(rope.scaling)}
    values = {theirs: getattr(rope.scaling, ours) for theirs, ours in NAMES[kind].items()}
    unset = {theirs for theirs, ours in NAMES[kind].items() if values[theirs] is None and defaults[ours] is None}
    return {"rope_type": kind} | {theirs: value for theirs, value in values.items() if theirs not in unset}
