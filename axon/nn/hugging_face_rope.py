"""Rotary frequencies in a config.json, as transformers 5.23 understands it: `rope_theta` and `rope_scaling`, or both in
`rope_parameters`, with some fields at the top level, and for some architectures each kind of layer its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from axon.errors import UserError, suggest
from axon.fields import field_values
from axon.foreign_json import ANY, FLAG, NULL, OBJECT, SIZE, TEXT, Kind, Required, list_of, number, read_field, shown
from axon.nn.hugging_face import Converted
from axon.nn.rope import Rope, Scaling
from axon.nn.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from axon.nn.sizes import head_dim

CONFIG = "config.json"
FULL, LOCAL = "full_attention", "sliding_attention"
OF_LOCAL = "rope_local_base_freq"
ORIGINAL, FRACTION, MOST = "original_max_position_embeddings", "partial_rotary_factor", "max_position_embeddings"
THEIRS = {"rope_scaling": OBJECT | NULL, "rope_parameters": OBJECT | NULL} | dict.fromkeys(
    ("rope_theta", FRACTION, ORIGINAL), ANY
)
"""Fields at the top level; a value that is not used may be anything."""
POSITIVE, SHARES = number("(0, inf)"), list_of(number("(0, inf)"))
NOT_NEGATIVE = number("[0, inf)") | NULL
SINCE_NULL = POSITIVE | NULL


@dataclass(frozen=True)
class Scaled:
    """A `rope_type`: our scaling, and its fields, by their name: ours, what it may be, and what it is where absent."""

    scaling: type[Scaling]
    fields: Mapping[str, tuple[str, Kind, Any]]


SCALED = {
    "linear": Scaled(LinearScaling, {"factor": ("factor", POSITIVE, Required)}),
    "dynamic": Scaled(DynamicScaling, {"factor": ("factor", POSITIVE, Required)}),
    "llama3": Scaled(
        Llama3Scaling,
        {
            "factor": ("factor", POSITIVE, Required),
            "low_freq_factor": ("low", POSITIVE, Required),
            "high_freq_factor": ("high", POSITIVE, Required),
            ORIGINAL: ("original", SIZE, Required),
        },
    ),
    "yarn": Scaled(
        YarnScaling,
        {
            "factor": ("factor", SINCE_NULL, Required),
            ORIGINAL: ("original", SIZE, Required),
            "beta_fast": ("fast", NOT_NEGATIVE, None),
            "beta_slow": ("slow", NOT_NEGATIVE, None),
            "attention_factor": ("attention_factor", SINCE_NULL, None),
            "truncate": ("truncate", FLAG | NULL, True),
            "mscale": ("mscale", NOT_NEGATIVE, 0.0),
            "mscale_all_dim": ("mscale_all_dim", NOT_NEGATIVE, 0.0),
        },
    ),
    "longrope": Scaled(
        LongRopeScaling,
        {
            "short_factor": ("short", SHARES, Required),
            "long_factor": ("long", SHARES, Required),
            ORIGINAL: ("original", SIZE, Required),
            "factor": ("factor", SINCE_NULL, None),
            "attention_factor": ("attention_factor", SINCE_NULL, None),
        },
    ),
    "proportional": Scaled(
        ProportionalScaling,
        {FRACTION: ("fraction", number("[0, 1]"), 1.0), "factor": ("factor", POSITIVE, 1.0)},
    ),
}
"""`rope_type` → what it is; `default` is none."""


NAMES = {"rope_type", "type", "rope_theta", FRACTION}.union(*(scaled.fields for scaled in SCALED.values()))


def unknown_in_ropes(config: Mapping[str, Any], by_layer: bool) -> list[str]:
    """What nothing reads of `rope_scaling` and `rope_parameters`; `by_layer`: whether kinds of layer have their own."""
    places = {name: config[name] for name in ("rope_scaling", "rope_parameters") if isinstance(config.get(name), dict)}
    kinds = (FULL, LOCAL) if by_layer else ()
    nested = {f"{name}.{kind}": one[kind] for name, one in places.items() for kind in kinds if kind in one}
    inner = {where: one for where, one in nested.items() if isinstance(one, dict)}
    found = [(where, name) for where, one in (places | inner).items() for name in one if name not in NAMES]
    return [f"{where}.{name}" for where, name in found if f"{where}.{name}" not in nested]


@dataclass(frozen=True)
class RopeRules:
    """What an architecture makes of these fields.

    Args:
        theta: where a config.json has none; local_theta: of local layers, of an architecture with frequencies for each
            kind of layer: Gemma 3 reads it from `rope_local_base_freq`, OLMo-3 from nowhere. positions: likewise,
            `max_position_embeddings`. default: `rope_parameters`.
        layered: whether it knows layers of several kinds, all with the same frequencies. phi: whether it has heads that
            are rotated in part, by default this `fraction`, and of the scalings LongRoPE alone. latent: whether scores
            are scaled by `mscale_all_dim`. width: of a head, for the scalings that transformers computes from
            `head_dim` alone: where that is absent or null, it is "filled" in; "sizes" say it where it is absent, not
            where it is null; nothing else than "head_dim" does.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    positions: int = 2048
    default: Mapping[str, Any] = field(default_factory=dict)
    layered: bool = False
    phi: bool = False
    fraction: float = 1.0
    latent: bool = False
    width: Literal["filled", "sizes", "head_dim"] = "sizes"


def rope_field(rules: RopeRules, *ours: str) -> Converted:
    """Our fields `ours`, by default `rope`, each a `Rope`, as `rules` have it."""
    names = ours or ("rope",)

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        rope = _rope(rules, config, *_one(rules, config))
        return dict.fromkeys(names, rope)

    def write(model: Any) -> dict[str, Any]:
        rope = field_values(model, names)[names[0]]
        none = {"rope_type": "default"} if rules.default else None
        written = {"rope_theta": float(rope.theta), "rope_scaling": _written(rope) or none}
        if rope.fraction != 1:
            written[FRACTION] = rope.fraction
        if rules.width == "head_dim":
            written["head_dim"] = head_dim(model)
        return written | _at_the_top(rope)

    return Converted(read, write, THEIRS)


def two_ropes(rules: RopeRules) -> Converted:
    """`rope` and `local_rope`, of an architecture that has one for each kind of layer."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        both = _two(rules, config)
        return {ours: _rope(rules, config, *both[kind]) for ours, kind in (("rope", FULL), ("local_rope", LOCAL))}

    def write(model: Any) -> dict[str, Any]:
        ropes = {FULL: model.rope, LOCAL: model.local_rope}
        nested: dict[str, Any] = {
            kind: {"rope_type": "default", **(_written(rope) or {}), "rope_theta": float(rope.theta)}
            for kind, rope in ropes.items()
        }
        # transformers looks for it beside the kinds of layer, not within.
        truncate = [one.pop("truncate") for one in nested.values() if "truncate" in one]
        beside = {"truncate": False} if truncate and not any(truncate) else {}
        return {"rope_parameters": nested | beside} | _at_the_top(model.local_rope, model.rope)

    return Converted(read, write, THEIRS | {OF_LOCAL: ANY})


def _one(rules: RopeRules, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What says it, and all that is said, where all layers have the same frequencies."""
    scaling = read_field(CONFIG, config, "rope_scaling", OBJECT | NULL, None)
    parameters = read_field(CONFIG, config, "rope_parameters", OBJECT | NULL, None)
    where = f"{CONFIG}: {'rope_scaling' if scaling else 'rope_parameters'}"
    described = dict(scaling or (rules.default if parameters is None else parameters))
    if rules.layered and (nested := [kind for kind in (FULL, LOCAL) if kind in described]):
        raise UserError(f"{where}: {nested[0]} is for a kind of layer; this architecture has the same for all layers")
    described.setdefault("rope_theta", config.get("rope_theta", rules.theta))
    _add_fraction(rules, config, described)
    kind = described.setdefault("rope_type", described.get("type", "default"))
    if rules.phi and kind == "su":  # LongRoPE's name in the first files of Phi-3
        read_field(where, described, ORIGINAL, SIZE)
    if rules.phi and kind in ("su", "yarn"):
        described["rope_type"] = kind = "longrope"
    original = read_field(CONFIG, config, ORIGINAL, SIZE, 4096) if rules.phi else config.get(ORIGINAL, Required)
    if kind not in ("llama3", "yarn", "longrope"):
        return where, described
    if original is Required:
        return where, {ORIGINAL: _positions(rules, config)} | described
    read_field(where, described, ORIGINAL, SIZE, None)
    return where, described | {ORIGINAL: read_field(CONFIG, config, ORIGINAL, SIZE, original)}


def _two(rules: RopeRules, config: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same for each kind of layer. `rope_scaling` is of full layers alone, as before transformers 5."""
    name, plain = "rope_parameters", {"rope_type": "default"}
    scaling = read_field(CONFIG, config, "rope_scaling", OBJECT | NULL, None)
    parameters = read_field(CONFIG, config, name, OBJECT | NULL, None)
    both = {FULL: plain, LOCAL: plain} if parameters is None else parameters
    where = f"{CONFIG}: {name}"
    if scaling is not None:
        both = both | {FULL: read_field(where, both, FULL, OBJECT) | scaling}
    thetas = {FULL: config.get("rope_theta", rules.theta), LOCAL: rules.local_theta}
    if rules.local_theta != rules.theta:
        thetas[LOCAL] = config.get(OF_LOCAL, rules.local_theta)
    found = {}
    for kind, theta in thetas.items():
        described: dict[str, Any] = dict(
            plain if (own := read_field(where, both, kind, OBJECT | NULL, None)) is None else own
        )
        described.setdefault("rope_theta", theta)
        _add_fraction(rules, config, described)
        if described.setdefault("rope_type", described.get("type", "default")) in ("llama3", "yarn", "longrope"):
            described.setdefault(ORIGINAL, _positions(rules, config))
        described.pop("truncate", None)
        found[kind] = f"{where}.{kind}", described | {n: both[n] for n in ("truncate",) if n in both}
    return found


def _add_fraction(rules: RopeRules, config: Mapping[str, Any], described: dict[str, Any]) -> None:
    if config.get(FRACTION) is not None or (rules.phi and FRACTION in config):
        described.setdefault(FRACTION, config[FRACTION])


def _positions(rules: RopeRules, config: Mapping[str, Any]) -> int:
    return read_field(CONFIG, config, MOST, SIZE, rules.positions)


def _rope(rules: RopeRules, config: Mapping[str, Any], where: str, described: Mapping[str, Any]) -> Rope:
    """A `Rope` of all that is said. Raises `UserError` for a kind of scaling that there is not."""
    kind = read_field(where, described, "rope_type", TEXT)
    kinds = ["default", *(["longrope"] if rules.phi else SCALED)]
    if kind not in kinds:
        raise UserError(f"{where}: rope_type is {shown(kind)}, which the architecture has not.{suggest(kind, kinds)}")
    _check_width(rules, config, kind)
    theta, fraction = float(read_field(where, described, "rope_theta", POSITIVE)), 1.0
    if rules.phi:
        fraction = read_field(where, described, FRACTION, number("(0, 1]"), rules.fraction)
    elif kind not in ("default", "proportional") and read_field(where, described, FRACTION, POSITIVE, 1.0) != 1:
        raise UserError(
            f"{where}: {FRACTION} is {shown(described[FRACTION])}; with rope_type {kind} this architecture rotates all"
        )
    if kind == "default":
        return Rope(theta, fraction=fraction)
    values = {
        ours: read_field(where, described, theirs, allowed, default)
        for theirs, (ours, allowed, default) in SCALED[kind].fields.items()
    }
    if rules.latent and described.get("mscale_all_dim") and (kind != "yarn" or values["factor"] is None):
        raise UserError(f"{where}: mscale_all_dim must go with rope_type yarn and a factor, and it is of {kind}")
    return Rope(theta, _scaling(kind, values, _positions(rules, config)), fraction)


def _scaling(kind: str, values: dict[str, Any], positions: int) -> Scaling:
    """Of its fields by our names, as they are read; `positions`: `max_position_embeddings`."""
    if kind == "dynamic":
        values["original"] = positions
    if kind in ("yarn", "longrope") and values["factor"] is None:
        values["factor"] = positions / values["original"]
    if kind == "longrope":
        values |= {name: tuple(map(float, values[name])) for name in ("short", "long")}
    if kind == "yarn":
        values |= {"fast": values["fast"] or 32.0, "slow": values["slow"] or 1.0}
        values |= {name: values[name] or 0.0 for name in ("mscale", "mscale_all_dim")}
        values["truncate"] = bool(values["truncate"])
    return SCALED[kind].scaling(**values)


def _check_width(rules: RopeRules, config: Mapping[str, Any], kind: str) -> None:
    """transformers works out `head_dim` of some architectures, and of others takes it as it stands."""
    alone = rules.width == "head_dim" and kind in ("dynamic", "yarn", "longrope") and config.get("head_dim") is None
    if alone or (rules.width == "sizes" and config.get("head_dim", 0) is None):
        raise UserError(f"{CONFIG}: head_dim is not said, and with rope_type {kind} it must be: a number of elements")


def _written(rope: Rope) -> dict[str, Any] | None:
    """`rope_scaling`; None for none."""
    if rope.scaling is None:
        return None
    kind, scaled = next((kind, one) for kind, one in SCALED.items() if isinstance(rope.scaling, one.scaling))
    defaults = {one.name: one.default for one in fields(rope.scaling)}
    set_to = field_values(rope.scaling)
    values = {theirs: kind_of.written(set_to[ours]) for theirs, (ours, kind_of, _) in scaled.fields.items()}
    unset = {theirs for theirs, (ours, *_) in scaled.fields.items() if values[theirs] is None is defaults[ours]}
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {"rope_type": kind} | {name: value for name, value in listed.items() if name not in unset}


def _at_the_top(*ropes: Rope) -> dict[str, Any]:
    """What `transformers` reads of a scaling beside it."""
    written = {}
    for scaling in (rope.scaling for rope in ropes):
        if isinstance(scaling, LongRopeScaling):
            written[ORIGINAL] = SIZE.written(scaling.original)
        if isinstance(scaling, DynamicScaling):
            written[MOST] = SIZE.written(scaling.original)
    return written
