"""Rotary frequencies in a config.json: `rope_theta` and `rope_scaling`, or both in `rope_parameters`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from axon.errors import UserError, suggest
from axon.foreign_json import NULL, OBJECT, SIZE, number
from axon.nn.hugging_face import Converted
from axon.nn.rope import Rope
from axon.nn.rope_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

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
    "longrope": {
        "short_factor": "short",
        "long_factor": "long",
        "original_max_position_embeddings": "original",
        "factor": "factor",
        "attention_factor": "attention_factor",
    },
}
"""`rope_type` → their name → our field."""

SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling, "longrope": LongRopeScaling}
THEIRS = {
    "rope_theta": number("(0, inf)"),
    "rope_scaling": OBJECT | NULL,
    "rope_parameters": OBJECT | NULL,
    "partial_rotary_factor": number("(0, 1]") | NULL,
    "original_max_position_embeddings": SIZE | NULL,
}


def rope_field(ours: str = "rope", theta: float = 10_000.0, long: bool = False) -> Converted:
    """The field `ours`, a `Rope`; `theta`: that of a config.json without one. `long`: whether the architecture has
    LongRoPE, and heads that are rotated in part."""

    def write(model: Any) -> dict[str, Any]:
        rope = getattr(model, ours)
        if not long and (rope.fraction != 1 or isinstance(rope.scaling, LongRopeScaling)):
            raise UserError(f"it has neither LongRoPE nor heads that are rotated in part, and {ours} is {rope}")
        return write_rope(rope)

    return Converted(lambda config: {ours: read_rope(described(config, theta), config)}, write, THEIRS)


def described(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """What a config.json says of rotary frequencies, as `rope_parameters` says it."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", theta), **found}


def read_one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope` and `local_rope` of a config that has one for layers of both kinds."""
    rope = read_rope(described(config, 10_000.0), config)
    return {"rope": rope, "local_rope": rope}


def read_two_ropes(config: Mapping[str, Any], full_theta: float, local_theta: float | None) -> dict[str, Any]:
    """`rope` and `local_rope` of a config that has one for each kind of layer.

    Before transformers 5 `rope_scaling` was of full layers alone; `full_theta`, `local_theta`: of such a config that
    does not say them. None: local layers have the theta of full ones.
    """
    both = config.get("rope_parameters") or {}
    if "full_attention" in both:
        full, local = both["full_attention"], both["sliding_attention"]
    else:
        full = described(config, full_theta)
        theta = full["rope_theta"] if local_theta is None else config.get("rope_local_base_freq", local_theta)
        local = {"rope_theta": theta}
    return {"rope": read_rope(full, config), "local_rope": read_rope(local, config)}


def write_two_ropes(model: Any) -> dict[str, Any]:
    """What `read_two_ropes` reads, of a model with `rope` and `local_rope`."""
    ropes = {"full_attention": model.rope, "sliding_attention": model.local_rope}
    return {"rope_parameters": {kind: rope_parameters(rope) for kind, rope in ropes.items()}}


def read_rope(described: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    """A `Rope` of what `rope_parameters` says. Raises `UserError` for a kind of scaling that there is not."""
    kind = described.get("rope_type", described.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # as the first files of Phi-3 call it
    theta = float(described["rope_theta"])
    fraction = described.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind == "default":
        return Rope(theta, fraction=fraction)
    if kind not in NAMES:
        raise UserError(
            f"config.json: rope_type is {kind!r}, which axon.nn.Rope has not.{suggest(kind, ['default', *NAMES])}"
        )
    given = {ours: described[theirs] for theirs, ours in NAMES[kind].items() if described.get(theirs) is not None}
    if kind == "yarn":
        given.setdefault("original", config.get("max_position_embeddings"))
    if kind == "longrope":
        longest = config.get("max_position_embeddings", 4096)
        given.setdefault("original", config.get("original_max_position_embeddings") or longest)
        given.setdefault("factor", max(1.0, longest / given["original"]))
        given |= {name: tuple(map(float, given[name])) for name in ("short", "long")}
    return Rope(theta, SCALINGS[kind](**given), fraction)


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    written = {"rope_theta": rope.theta, "rope_scaling": write_scaling(rope)}
    if rope.fraction != 1:
        written["partial_rotary_factor"] = rope.fraction
    if isinstance(rope.scaling, LongRopeScaling):
        written["original_max_position_embeddings"] = rope.scaling.original
    return written


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
