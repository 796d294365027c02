"""`axon compile`: a run's whole training step, or an engine's steps, compiled for a machine that is not here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from axon.config import load, root_of
from axon.disk import output, writing
from axon.plan.report import Report, compile_step
from axon.plan.serving import Reading, ServingReport, compile_serving
from axon.plan.topology import devices
from axon.run import Serve, Train, placed, program, serving_program

GIB = 2**30


def compile_config(
    path: Path, target: str, overrides: Sequence[str], plan: Path | None, text: Path | None
) -> Report | ServingReport:
    """Compile the step that the file at `path` describes, with the file `plan` over it, for topology `target`, or an
    engine's decode and prefill steps; its HLO, or that of the decode step, goes to `text`, if given.

    Raises `ConfigError`, `LayoutError` and `UserError` for what a person has to change, a step that does not fit among
    them.
    """
    text = text and output(text, "--text", ".txt", ".hlo")
    tree: Train | Serve = load(path, overrides, plan=plan, root=root_of(path, overrides)).tree
    placement = placed(tree, devices(target))
    if isinstance(tree, Serve):
        report, hlo = compile_serving(serving_program(tree, placement), target)
    else:
        report, hlo = compile_step(program(tree, placement), target)
    if text is not None:
        with writing(text):
            text.write_text(hlo)
    return report


def show_report(report: Report | ServingReport) -> None:
    """Print it for a person."""
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    if isinstance(report, Report):
        _show(console, report)
        return
    for name, tokens, step in zip(("decode", "prefill"), report.tokens, (report.decode, report.prefill), strict=True):
        console.print(f"{name}, a step of {tokens} tokens", style="bold")
        _show(console, step)
    for name, step in zip(("multi-token block", "logits of its guesses"), report.guess, strict=False):
        console.print(f"decode: {name}", style="bold")
        _show(console, step)
    for step in report.encoder:
        console.print("encoder, the longest text", style="bold")
        _show(console, step)
    console.print("\n".join(_reading(report.reading)), markup=False, soft_wrap=True)


def _reading(reading: Reading) -> Iterator[str]:
    least = f"at least {reading.least_seconds * 1e3:.2f} ms at the memory's bandwidth"
    yield f"decode reads {reading.bytes / 1e9:.2f} GB of each device: weights, and the cache at half length: {least}"
    if reading.seconds is not None and (attention := reading.attention) is not None:
        kernels, share = reading.kernels or 0.0, f"{reading.share:.0%} of the bandwidth"
        cycles = reading.seconds - attention.total - kernels
        others = f", other kernels {kernels * 1e3:.2f}" if kernels else ""
        by = f"by the compiler's cycles {cycles * 1e3:.2f}{others}, and"
        yield f"predicted: {reading.seconds * 1e3:.2f} ms, {share}; {by}"
        parts = f"its pages' bytes {attention.memory * 1e3:.2f}, its bundles {attention.compute * 1e3:.2f}"
        yield f"attention {attention.total * 1e3:.2f}: the longer of {parts}; new tokens {attention.write * 1e3:.2f}"


def _show(console: Console, report: Report) -> None:
    mesh = " × ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    console.print(f"{report.target}: mesh {mesh}, compiled in {report.compile_seconds:.0f} s", markup=False)
    for topic, choice in report.choices.items():
        console.print(f"{topic}: {choice}", markup=False, soft_wrap=True)
    console.print(_memory(report), _work(report), collectives_table(report), sep="\n")
    console.print("\n".join(_closing(report)), markup=False, soft_wrap=True)


def _memory(report: Report) -> Table:
    table = _table("memory of a device", "part", "GiB")
    memory = report.memory
    for name in ("parameters", "optimizer", "frozen models", "batch", "cache"):
        if name in memory:
            table.add_row(f"  {name}", _gib(memory[name]))
    for name in ("arguments", "outputs", "aliased", "temporaries", "code", "total", "available"):
        table.add_row(name, _gib(memory[name]))
    for where, name in (("on the host", "host"), ("on disk", "disk")):
        if memory[name]:
            table.add_row(where, _gib(memory[name]))
    return table


def _work(report: Report) -> Table:
    table = _table("a step of a device", "", "")
    table.add_row("model TFLOP", f"{report.model_flops / 1e12:.1f}")
    table.add_row("executed TFLOP", f"{report.executed_flops / 1e12:.1f}")
    for name, count in report.cycles.items():
        if count:
            table.add_row(f"Mcycles, {name}", f"{count / 1e6:,.0f}")
    for name, count in report.kernels.items():
        table.add_row(name, f"× {count}")
    for name, count in report.kernel_cycles.items():
        table.add_row(f"Mcycles by bundles, {name}", f"{count / 1e6:,.0f}")
    return table


def collectives_table(report: Report, title: str = "collectives of a device") -> Table:
    """The collectives of a compiled step by kind and mesh axes."""
    table = _table(title, "kind", "mesh axes", "times", "GB of results", "GB sent", "asynchronous")
    for one in report.collectives:
        share = f"{one.asynchronous / one.sent:.0%}" if one.sent else "–"
        result, sent = f"{one.bytes / 1e9:.3f}", f"{one.sent / 1e9:.3f}"
        table.add_row(one.kind, " ".join(one.mesh_axes) or "–", f"{one.count}", result, sent, share)
    return table


def _closing(report: Report) -> Iterator[str]:
    used = report.memory["total"] / report.memory["available"]
    yield f"fits: {used:.0%} of the device's memory; {report.asynchronous:.0%} of the bytes sent are asynchronous"
    yield from report.uncounted


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=any(headings))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 or heading == "mesh axes" else "right")
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
