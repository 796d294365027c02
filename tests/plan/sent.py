"""What a compiled program sends, read from its text: to compare with what was read from the traced one."""

import math
import re
from collections import Counter

import numpy as np

from axon.plan.moves import sent

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def sent_by(text, mesh):
    """(kind, mesh axes) → bytes that one device sends each time the program runs; `mesh`: mesh axis → size."""
    times, total = _times(text), Counter()
    for computation, line in _lines(text):
        if found := _COLLECTIVE.search(line):
            axes = _mesh_axes(line, mesh)
            ways = math.prod(mesh[a] for a in axes)
            size = sum(SIZES.get(d, 4) * math.prod(int(n) for n in s.split(",") if n) for d, s in _ARRAY.findall(found[1]))
            whole = size * ways if found[2] == "reduce-scatter" else size
            total[found[2], axes] += times[computation] * sent(found[2], whole, ways)
    return +total


def _lines(text):
    computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[2]
        else:
            yield computation, line


def _times(text):
    """Computation → how often it runs: a loop's body as often as its known trip count."""
    entry = next(m[2] for m in map(_COMPUTATION.match, text.splitlines()) if m and m[1])
    calls = {}
    for computation, line in _lines(text):
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        for name in _CALLED.findall(line):
            calls.setdefault(computation, []).append((name, int(trips[1]) if trips else 1))
    times, queue = Counter({entry: 1}), [(entry, 1)]
    while queue:
        caller, often = queue.pop()
        for name, trips in calls.get(caller, ()):
            times[name] += often * trips
            queue.append((name, often * trips))
    return times


def _mesh_axes(line, mesh):
    """The mesh axes whose devices take part together: those that vary within the first group."""
    grid = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", found[1]), strict=True)
        numbers = np.arange(grid.size).reshape([int(n) for n in sizes])
        group = numbers[tuple(slice(None) if f"'{name}'" in found[2] else 0 for name in names)].ravel()
    elif found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        group = [int(n) for n in found[1].split(",")]
    elif found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        groups, shape, order = ([int(n) for n in (part or "").split(",") if n] for part in found.groups())
        numbers = np.arange(math.prod(shape)).reshape(shape)
        group = numbers.transpose(order or range(len(shape))).reshape(groups)[0]
    else:
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)[1]
        group = next(p for p in (list(map(int, re.findall(r"\d+", pair))) for pair in pairs.split("},")) if p[0] != p[1])
    places = [np.argwhere(grid == n)[0] for n in group]
    return tuple(a for i, a in enumerate(mesh) if len({int(place[i]) for place in places}) > 1)
