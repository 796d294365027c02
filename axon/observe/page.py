"""A run as one HTML page: no script, no network; figures, plots, events, configuration and environment."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

import numpy as np

from axon.foreign_json import NUMBER
from axon.observe.charts import Line, Mark, chart, stacked_bar
from axon.observe.goodput import PARTS, Goodput
from axon.observe.lines import Record
from axon.observe.page_style import html_page
from axon.observe.plot import series, smoothed
from axon.observe.progress import duration

EVENTS = 300
"""Rows of the table of events at most: the latest."""

NOTABLE = {
    "resume": "good",
    "not_finite": "bad",
    "spike": "bad",
    "skip": "warn",
    "rollback": "warn",
    "hang": "bad",
    "stop": "warn",
    "restart": "warn",
    "give_up": "bad",
    "fetched": "warn",
    "mirror_failed": "warn",
}
"""Kinds of events that are marked in the plots, and how."""

USUAL = ("steps", "compile_begin", "save_begin", "save_blocked", "save_end", "mirrored")
"""Kinds that the table of events leaves out: they are many, and their sums are above it."""


CHARTED = ("step", "loss", "tokens", "tokens_per_second", "step_seconds", "grad_norm")
"""Metrics that have a chart or a tile of their own, or are in one."""

SMALL = 400
"""Width of the charts of other metrics, two of which are beside each other."""

UNTOLD = ("time", "step", "kind", "documents", "memory", "answers")
"""Fields of an event that its row has elsewhere, or that are too long for it."""

COMPARED = 5
"""Evaluations at most whose answers are side by side: the first, the last, and some evenly between."""


TitledTable = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, headings and rows of a table."""


class Run(NamedTuple):
    """The content of a page: the run's name, its records, its configuration as text, its `run.json`, and the tables of
    its profile: title, headings, rows."""

    name: str
    events: Sequence[Record]
    metrics: Sequence[Record]
    config: str
    record: Mapping[str, Any]
    profile: Sequence[TitledTable] = ()


def profile_page(name: str, tables: Iterable[TitledTable]) -> str:
    """The tables of a traced step as a page of its own, as HTML."""
    sections = (_section(title, _rows(headings, rows)) for title, headings, rows in tables)
    return html_page(name, "".join([f"<header><h1>{escape(name)}</h1></header>", *sections]))


def page(run: Run, time: Goodput) -> str:
    """The page, as HTML."""
    marks = _marks(run.events)
    sections = [
        f"<header><h1>{escape(run.name)}</h1><p>{_status(run)}</p></header>",
        _tiles(run, time),
        _section("Where the time went", _goodput(time)),
        _section(f"Loss, nats per {run.record.get('loss_unit', 'token')}", chart(_loss_lines(run.metrics), marks)),
        _section("Tokens per second", chart(_lines(run.metrics, "tokens_per_second", "tokens/s"), marks, True)),
        _section("Gradient norm", chart(_lines(run.metrics, "grad_norm", "gradient norm"), marks, True)),
        _section("Memory, GiB", chart(_memory_lines(run.events), marks, True)),
        _other_metrics(run.metrics, marks),
        _answer_table(run.events),
        *(_section(f"Profile: {title}", _rows(headings, rows)) for title, headings, rows in run.profile),
        _section("Events", _event_table(run.events)),
        _section("Configuration", f"<pre>{escape(run.config)}</pre>"),
        _section("Environment", _table(_flat(run.record))),
    ]
    return html_page(run.name, "".join(sections))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _status(run: Run) -> str:
    end = next((event for event in reversed(run.events) if event["kind"] in ("end", "start", "give_up")), None)
    if end is None:
        return "no events"
    said = {"start": "running, or killed", "give_up": "given up"}.get(end["kind"]) or end.get("outcome", "")
    error = f": {escape(end['error'])}" if end.get("error") else ""
    return f"{escape(said)}{error}, {_at(run.events[-1]['time'])}"


def _tiles(run: Run, time: Goodput) -> str:
    losses, evaluated = series(run.metrics, "loss")[1], series(run.metrics, "eval_loss")[1]
    speed, tokens = series(run.metrics, "tokens_per_second")[1], series(run.metrics, "tokens")[1]
    steps = series(run.metrics, "loss")[0]
    faults = sum(event["kind"] in ("not_finite", "spike", "hang") for event in run.events)
    tiles = {
        "goodput": f"{100 * time.share:.1f} %" if time.starts else "–",
        "step": f"{steps[-1]:,.0f}" if len(steps) else "–",
        "loss": f"{smoothed(losses)[-1]:.4f}" if len(losses) else "–",
        "held-out loss": f"{evaluated[-1]:.4f}" if len(evaluated) else "–",
        "tokens": f"{tokens[-1]:,.0f}" if len(tokens) else "–",
        "tokens/s, median": f"{np.median(speed):,.0f}" if len(speed) else "–",
        "wall time": duration(time.total),
        "starts": str(time.starts),
        "faults": str(faults),
    }
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles.items())
    return f'<dl class="tiles">{"".join(items)}</dl>'


def _goodput(time: Goodput) -> str:
    shown = {name: value for name, value in time.seconds.items() if value > 0 or name == "productive"}
    rows = (
        f'<tr><td><i class="key {name}"></i>{name}</td><td class="number">{seconds_text(value)}</td>'
        f'<td class="number">{100 * value / time.total if time.total else 0:.1f} %</td><td>{PARTS[name]}</td></tr>'
        for name, value in shown.items()
    )
    return f"{stacked_bar(shown, time.total)}<table>{''.join(rows)}</table>"


def seconds_text(seconds: float) -> str:
    """`0.31 s`, `12.3 s`, `4:05`."""
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def _loss_lines(metrics: Sequence[Record]) -> list[Line]:
    steps, losses = series(metrics, "loss")
    if not len(steps):
        return []
    lines = [Line("", steps, losses, "faint"), Line("training, smoothed", steps, smoothed(losses), "a")]
    return [*lines, Line("held-out", *series(metrics, "eval_loss"), "dots")]


def _lines(metrics: Sequence[Record], name: str, label: str) -> list[Line]:
    steps, values = series(metrics, name)
    if not len(steps):
        return []
    return [Line("", steps, values, "faint"), Line(label, steps, smoothed(values), "a")]


def _memory_lines(events: Sequence[Record]) -> list[Line]:
    names = {"host": ("this process", "a"), "device": ("first device", "b"), "device_peak": ("device, peak", "c")}
    found = [(e.get("memory") or {}) | {"step": e.get("step")} for e in events if e["kind"] == "steps"]
    lines = []
    for name, (label, style) in names.items():
        steps, values = series(sorted(found, key=lambda record: record["step"] or 0), name)
        lines.append(Line(label, steps, values / 2**30, style))
    return lines


def _other_metrics(metrics: Sequence[Record], marks: Sequence[Mark]) -> str:
    """A small chart of each other number of steps and evaluations: what the objective, the data and the model say."""
    numbers = [{name: value for name, value in record.items() if NUMBER.accepts(value)} for record in metrics]
    names = dict.fromkeys(name.removeprefix("eval_") for record in numbers for name in record)
    charts = [_small(name, numbers, marks) for name in names if name not in CHARTED]
    return _section("Other metrics", f'<div class="charts">{"".join(charts)}</div>') if charts else ""


def _small(name: str, numbers: Sequence[Record], marks: Sequence[Mark]) -> str:
    lines = [*_lines(numbers, name, "training"), Line("held-out", *series(numbers, f"eval_{name}"), "dots")]
    title = escape(name.replace("_", " "))
    return f"<figure><figcaption>{title}</figcaption>{chart(lines, marks, width=SMALL)}</figure>"


def _answer_table(events: Sequence[Record]) -> str:
    """The answers to the same held-out questions, a row each, from evaluation to evaluation; right ones in green."""
    steps = {
        event["step"]: event["answers"] for event in events if event.get("step") is not None and event.get("answers")
    }
    if not steps:
        return ""
    places = np.unique(np.linspace(0, len(steps) - 1, COMPARED).round().astype(int))
    shown = dict([*sorted(steps.items())][place] for place in places)
    rows = (_answer_row(asked) for asked in zip(*shown.values(), strict=False))
    head = "".join(f"<th>step {step:,}" for step in shown)
    table = f"<table class='answers'><tr><th>question<th>right answer{head}</tr>{''.join(rows)}</table>"
    return _section("Held-out questions, answered by the greedy choice of each token", table)


def _answer_row(asked: Sequence[Record]) -> str:
    question, expected = asked[0]["question"], asked[0]["expected"].strip()
    whose = f"<small>{escape(str(asked[0]['adapter']))}</small>" if "adapter" in asked[0] else ""
    return f"<tr><td>{escape(question)}{whose}<td>{escape(expected)}{''.join(map(_answer, asked))}</tr>"


def _answer(found: Record) -> str:
    said = ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}"
        for name, value in found["scores"].items()
        if name != "exact" and value is not None
    )
    style = "good" if found["scores"].get("exact") == 1 else ""
    return f'<td><b class="{style}">{escape(found["answer"].strip())}</b><small>{escape(said)}</small>'


def _rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is words."""
    head = "".join(f"<th>{escape(one)}" for one in headings)
    cells = (
        f"<tr><td>{escape(first)}{''.join(f'<td class=number>{escape(one)}' for one in others)}</tr>"
        for first, *others in rows
    )
    return f"<table><tr>{head}</tr>{''.join(cells)}</table>"


def _marks(events: Sequence[Record]) -> list[Mark]:
    return [
        Mark(event["step"], _kind(event), _described(event), NOTABLE[event["kind"]])
        for event in events
        if event["kind"] in NOTABLE and event.get("step")
    ]


def _event_table(events: Sequence[Record]) -> str:
    shown = [event for event in events if event["kind"] not in USUAL]
    rows = (
        f'<tr><td class="number">{_at(event["time"])}</td>'
        f'<td class="number">{"" if event.get("step") is None else format(event["step"], ",")}</td>'
        f'<td><b class="{NOTABLE.get(event["kind"], "")}">{escape(_kind(event))}</b></td>'
        f"<td>{escape(_details(event))}</td></tr>"
        for event in shown[-EVENTS:]
    )
    more = f"<p>The latest {EVENTS} of {len(shown):,}.</p>" if len(shown) > EVENTS else ""
    return f"{more}<table class='events'><tr><th>time, UTC<th>step<th>event<th>what it says</tr>{''.join(rows)}</table>"


def _described(event: Record) -> str:
    return f"{_kind(event)} {_details(event)}"[:200]


def _kind(event: Record) -> str:
    return event["kind"].replace("_", " ")


def _details(event: Record) -> str:
    """What an event says besides when and where, without the long lists."""
    left = {name: value for name, value in event.items() if name not in UNTOLD}
    return ", ".join(
        f"{name.replace('_', ' ')} {_short(value)}" for name, value in left.items() if value not in ({}, [])
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{name} {_short(inner)}" for name, inner in value.items())
    return " ".join(map(_short, value)) if isinstance(value, list) else str(value)


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found = {}
    for name, value in record.items():
        inner = _flat(value, f"{prefix}{name} ") if isinstance(value, dict) else {f"{prefix}{name}": str(value)}
        found |= inner
    return found


def _table(rows: Mapping[str, str]) -> str:
    cells = (
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f'<table class="facts">{"".join(cells)}</table>'


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
