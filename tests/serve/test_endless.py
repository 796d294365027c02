"""A schema is endless if what it requires goes on without end; every other one is left alone."""

import pytest

from axon.serve.endless import is_endless

SELF = {"$ref": "#"}
NODE = {"$ref": "#/$defs/a~1b%20c"}


def nested(kind):
    return {"$defs": {"a/b c": kind}, **NODE}


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, True),
        ({"type": "object", "properties": {"a": SELF}}, False),
        ({"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]}, False),
        ({"properties": {"a": SELF}, "required": ["a"]}, False),
        ({"type": "array", "items": SELF}, False),
        ({"type": "array", "items": SELF, "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{}], "items": SELF, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}], "items": SELF, "minItems": 2}, True),
        ({"type": "array", "prefixItems": [SELF], "minItems": 1}, True),
        ({"anyOf": [SELF, {"type": "null"}]}, False),
        ({"oneOf": [SELF, {"allOf": [{"type": "null"}, SELF]}]}, True),
        ({"anyOf": []}, False),
        (nested({"type": "object", "properties": {"next": NODE}, "required": ["next"]}), True),
        (nested({"type": "object", "properties": {"next": NODE}, "required": ["next"], "enum": [1]}), False),
        (nested({"type": "object", "required": ["next"]}), False),
        ({"$ref": "#/nowhere"}, False),
        ({"$ref": "other.json"}, False),
        ({"type": "object", "properties": [], "required": {}}, False),
        ({"$defs": {"unused": {"$ref": "#/$defs/unused"}}}, False),
        (True, False),
    ],
    ids=str,
)
def test_a_schema_is_endless_if_what_it_requires_is(schema, endless):
    assert is_endless(schema) == endless


@pytest.mark.parametrize("end", [True, False])
def test_a_chain_of_references_is_followed(end, rng):
    """Whatever their order; the last refers to itself, or may be left out."""
    names = [f"n{k}" for k in rng.permutation(40)]
    chain = {
        one: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{then}"}}, "required": ["x"]}
        for one, then in zip(names, [*names[1:], names[-1]], strict=True)
    }
    if end:
        chain[names[-1]]["required"] = []
    assert is_endless({"$ref": f"#/$defs/{names[0]}", "$defs": chain}) != end
