"""An engine's steps compiled for a machine that is not here: what they need, what they do, how fast they read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from axon.chips import KERNEL_CHIPS, known, part
from axon.errors import UserError
from axon.plan.bundles import recorded_chip
from axon.plan.compiled import host_bytes, memory_parts, total_bytes
from axon.plan.hlo import Module
from axon.plan.memory import gib
from axon.plan.out_of_memory import exceeded
from axon.plan.paged_attention import AttentionTime, attention_time
from axon.plan.report import Report, compile_timed, described
from axon.plan.topology import device_memory
from axon.serve.batch import Size
from axon.serve.program import ServingProgram


@dataclass(frozen=True)
class Reading:
    """The bytes that a decode step reads of each device's memory, and how long that takes.

    Args:
        bytes: see `ServingProgram.read_bytes`. least_seconds: at the bandwidth of the memory. seconds: predicted, the
            compiler's cycles at the chip's clock, and what is in no estimate of the compiler: `attention`, and
            `kernels`, the other ones (`axon.plan.bundles.kernel_cycles`); no collective is in it. They are None for a
            GPU, whose compiler estimates no cycles.
    """

    bytes: int
    least_seconds: float
    seconds: float | None
    attention: AttentionTime | None = None
    kernels: float | None = None

    @property
    def share(self) -> float | None:
        """Of the bandwidth."""
        return None if self.seconds is None else self.least_seconds / self.seconds


@dataclass(frozen=True)
class ServingReport:
    """Of the step in which every request gets a token, and of the largest one; `tokens`: of each. `guess`: where the
    model's own multi-token block guesses, of the programs that follow the first. `encoder`: of an encoder–decoder, of
    the encoder with the longest text."""

    decode: Report
    prefill: Report
    tokens: tuple[int, int]
    reading: Reading
    guess: tuple[Report, ...] = ()
    encoder: tuple[Report, ...] = ()

    def json(self) -> dict[str, Any]:
        """As plain dicts, lists, numbers and strings."""
        return asdict(self) | {"share_of_bandwidth": self.reading.share}


def compile_serving(program: ServingProgram, target: str) -> tuple[ServingReport, str]:
    """Compile the decode and the largest prefill step for topology `target`, of whose devices the program is; and the
    HLO text of the first. Raises `UserError` if one does not fit: by how much."""
    (decode, text), *guess = _compiled(program, program.decode, target)
    (prefill, _), *_ = _compiled(program, program.prefill, target)
    tokens, guess = (program.decode.tokens, program.prefill.tokens), tuple(report for report, _ in guess)
    encoder = tuple(
        _one(program, traced, flops, program.prefill, target)[0]
        for traced, flops in zip(program.traced_encoder(), program.encoder_flops, strict=True)
    )
    return ServingReport(decode, prefill, tokens, _reading(program, (decode, *guess)), guess, encoder), text


def _compiled(program: ServingProgram, size: Size, target: str) -> list[tuple[Report, str]]:
    """Report and HLO of each program of a step: the model's, and those of its multi-token block, if it guesses."""
    traced = program.traced(size), *program.traced_guess(size)
    return [_one(program, one, flops, size, target) for one, flops in zip(traced, program.flops(size), strict=True)]


def _one(program: ServingProgram, traced: Any, flops: float, size: Size, target: str) -> tuple[Report, str]:
    lowered = program.runtime.lower(traced)
    compiled, seconds = compile_timed(lowered, lambda message: _too_large(program, size, target, _amount(message)))
    text = compiled.as_text()
    memory = _memory(program, compiled)
    if memory["total"] > memory["available"]:
        amount = f"it needs {gib(memory['total'])} GiB on each device, which has {gib(memory['available'])}"
        raise UserError(_too_large(program, size, target, amount))
    report = described(program.runtime, target, Module.of(text), traced.jaxpr.jaxpr, memory, seconds)
    return replace(report, model_flops=flops / report.devices), text


def _memory(program: ServingProgram, compiled: Any) -> dict[str, int]:
    parts = memory_parts(compiled)
    available = device_memory(program.runtime.placement.devices[0])
    own = {"parameters": program.parameter_bytes(), "cache": program.cache_bytes()}
    idle = max(0, sum(own.values()) - parts["arguments"])  # what only the other programs of a step read
    total = total_bytes(parts) + idle
    return parts | own | {"total": total, "available": available, "host": host_bytes(compiled), "disk": 0}


def _reading(program: ServingProgram, decode: Sequence[Report]) -> Reading:
    """`decode`: of all programs of a decode step."""
    device, name = program.runtime.placement.devices[0], recorded_chip(program.runtime.placement)
    least = program.read_bytes() / (known(device.device_kind).bandwidth * part(device))
    if name is None or (clock := KERNEL_CHIPS[name].clock) is None:
        return Reading(program.read_bytes(), least, None)
    attention = attention_time(program, name)
    compiled = sum(sum(report.cycles.values()) for report in decode) / clock
    kernels = sum(sum(report.kernel_cycles.values()) for report in decode) / clock
    return Reading(program.read_bytes(), least, compiled + attention.total + kernels, attention, kernels)


def _amount(message: str) -> str:
    """What a RESOURCE_EXHAUSTED says: of HBM how much is needed, of another memory all of it."""
    if found := exceeded(message):
        what, needed, room = found
        return f"{what} {gib(needed)} GiB on each device, which has {gib(room)}"
    return next(line for line in message.splitlines() if "RESOURCE_EXHAUSTED" in line)


def _too_large(program: ServingProgram, size: Size, target: str, amount: str) -> str:
    capacity = program.capacity
    return (
        f"a step of {size.tokens} tokens does not fit {target}: {amount}. In GiB on each device: parameters "
        f"{gib(program.parameter_bytes())}, cache {gib(program.cache_bytes())}. What would help: a smaller "
        f"Capacity.cache_tokens (now {capacity.cache_tokens or 'half of requests × length'}), Capacity.requests (now "
        f"{capacity.requests}) or Capacity.tokens (now {capacity.tokens}), an int8 Capacity.cache_dtype, Serve.weights "
        "of int8, or a Layout.mesh that splits weights and heads over more devices"
    )
