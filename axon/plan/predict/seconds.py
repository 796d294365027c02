"""Seconds of a training step, a line for each thing that takes them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from axon.chips.target import Target
from axon.parallel.pipeline import Action
from axon.plan.predict.context import Context
from axon.plan.predict.kernels import BACKWARD_PRODUCTS, Kernels
from axon.plan.predict.links import Bandwidths, Links
from axon.plan.predict.memory import away
from axon.plan.predict.shards import PIPE, Gathered, Shards

PRODUCTS, REPEATED, ELEMENTWISE = "matrix products", "products again, by remat", "element-wise work"
TENSOR, WEIGHTS, GRADIENTS = "activations of split blocks", "weights and their gradients", "gradients at the end"
EXPERTS, CONTEXT, BUBBLE, STAGES = "tokens to experts", "keys and values", "bubble of the pipeline", "between stages"
HEAD, UPDATE, HOST, OFFLOADED = "head and loss", "update", "state on the host", "activations to the host and back"
UPDATE_PRODUCTS, INPUT, SAVES = "products of the update", "batch from the host", "checkpoints"

COMMUNICATION = frozenset({TENSOR, WEIGHTS, GRADIENTS, EXPERTS, CONTEXT, STAGES})
"""The lines of what is sent."""

EIGHT_BITS = 1.6
"""How many times as fast as in bfloat16 products in 8 bits are: 2 on the makers' sheets, of every chip that has them.
(Fitted: docs/planner.md.)"""

PASSES = 3
"""How often what a layer's forward makes goes through the memory: written once, read by the backward, whose own of
each goes through it too."""

RING_PASSES = 40
"""How often a step of ring attention reads or writes as much as the queries in float32, forward and backward: outputs
and gradients in float32 are added up, and operands chosen and laid out for the kernels. (By the TPU compiler's cycles:
docs/planner.md.)"""

ROWS = {"tpu": 0.2, "gpu": math.inf, "cpu": math.inf}
"""Share of the memory's bandwidth at which rows are gathered in another order. (Fitted, on TPUs: docs/planner.md.) On
others it is not known, and nothing is counted."""


@dataclass(frozen=True)
class Line:
    """One thing that a step does: seconds that it takes, and those of them during which other work runs.

    `mesh_axes`: of a collective, those that it runs along. Of a line that is explained (`explained.py`) `bytes`: what
    a device sends, or moves through its memory; `latency`: of its seconds, those of messages' latency; `algorithm`: of
    its gathers; `behind`: what hides it; `axes`: of the model, those that the mesh axes split.
    """

    name: str
    seconds: float
    hidden: float = 0.0
    mesh_axes: tuple[str, ...] = ()
    bytes: float = 0.0
    latency: float = 0.0
    algorithm: str = ""
    behind: str = ""
    axes: tuple[str, ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds by which the step is longer for it."""
        return max(0.0, self.seconds - self.hidden)


@dataclass(frozen=True)
class Seconds:
    """A step: its lines, and the share of the chips' peak that the model's own FLOPs have in it."""

    lines: tuple[Line, ...]
    mfu: float

    @property
    def total(self) -> float:
        return sum(line.exposed for line in self.lines)

    @property
    def sends_to_host(self) -> bool:
        """Whether state or activations wait in the host's memory."""
        return any(line.name in (HOST, OFFLOADED) for line in self.lines)

    def of(self, *names: str) -> float:
        """Exposed seconds of the lines with these names."""
        return sum(line.exposed for line in self.lines if line.name in names)


def seconds(
    shards: Shards, target: Target, bandwidths: Bandwidths | None = None, saved_every: int | None = None
) -> Seconds:
    """A step on `target`, whose links reach `bandwidths`, by default those of the table of chips.

    `saved_every`: steps between checkpoints, whose stalls are shared by these; None: there are none.
    """
    links = Links(target, dict(shards.split.placement.mesh.shape), bandwidths or Bandwidths.of(target))
    own = lines(shards, target, links, saved_every)
    total = sum(line.exposed for line in own)
    return Seconds(own, shards.split.work.model_flops / (total * target.chip.peak * target.devices))


def lines(shards: Shards, target: Target, links: Links, saved_every: int | None = None) -> tuple[Line, ...]:
    """The lines of a step that take time, over these links."""
    clock = _Clock(shards, target, links)
    own = [*clock.lines(), clock.saves(saved_every)]
    own.append(clock.input(sum(line.exposed for line in own)))
    return tuple(line for line in (_on_shared_cores(own) if target.platform == "cpu" else own) if line.seconds)


def _on_shared_cores(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines of devices that share cores: while one sends no other multiplies more, and one that waits leaves them
    free."""
    return (replace(line, hidden=0.0) for line in lines if line.name != BUBBLE)


@dataclass(frozen=True)
class _Layers:
    """Seconds of a microbatch in all layers of a device: work, and what is sent meanwhile."""

    forward: float
    backward: float
    repeated: float
    elementwise: float
    tensor: float
    tensor_hidden: float
    experts: float
    context: float
    context_hidden: float
    weights: float
    weights_hidden: float

    @property
    def others(self) -> float:
        """Besides the products."""
        exposed = self.weights - self.weights_hidden + self.context - self.context_hidden
        return self.elementwise + self.tensor - self.tensor_hidden + self.experts + exposed

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.repeated + self.others


@dataclass(frozen=True)
class _Clock:
    """How long the parts of a step take."""

    shards: Shards
    target: Target
    links: Links

    def lines(self) -> list[Line]:
        split, layers, micro = self.shards.split, self.layers, self.shards.layout.microbatches
        over = tuple(dict.fromkeys(a for one in self.all_weights for a in one[0].axes))
        return [
            Line(PRODUCTS, (layers.forward + layers.backward) * micro),
            Line(REPEATED, layers.repeated * micro),
            Line(ELEMENTWISE, layers.elementwise * micro),
            Line(HEAD, self.head() * micro),
            Line(TENSOR, layers.tensor * micro, layers.tensor_hidden * micro, split.tensor_axes),
            Line(EXPERTS, layers.experts * micro, 0.0, split.expert_axes),
            Line(CONTEXT, layers.context * micro, layers.context_hidden * micro, split.context_axes),
            Line(WEIGHTS, layers.weights * micro, layers.weights_hidden * micro, over),
            *self.pipeline(),
            Line(GRADIENTS, self.gradients(), 0.0, split.batch_axes),
            Line(UPDATE, self.update()),
            Line(UPDATE_PRODUCTS, split.update_flops / self.kernels.rate),
            Line(HOST, self.host()),
            self.offloaded(),
        ]

    # ---- the layers -----------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> _Layers:
        segments = range(len(self.shards.split.work.periods))
        each = [(self.period(number), self.shards.periods(number)) for number in segments]
        names = [field.name for field in fields(_Layers)]
        return _Layers(**{name: sum(vars(one)[name] * times for one, times in each) for name in names})

    def period(self, number: int) -> _Layers:
        """One period of a segment."""
        shards, split = self.shards, self.shards.split
        period = split.work.periods[number]
        share, *_ = split.again(number, shards.waits.computed)
        context, around = self.context.seconds(number, self.links)
        sends = 3 + share + (1 + share) * period.dispatched
        forward, backward, repeated = self.products(number)
        tensor = self.tensor(number, share)
        weights, hidden = self.gathers(split.weights[number], forward, backward + repeated)
        return _Layers(
            forward=forward,
            backward=backward,
            repeated=repeated,
            elementwise=shards.tokens * self.moved(number) / self.target.chip.bandwidth,
            tensor=tensor,
            tensor_hidden=min(tensor, forward + backward - self.attention(number)) if self.in_rings else 0.0,
            experts=sends * self.links.exchange(split.expert_axes, split.exchanged[number] * shards.stream),
            context=context,
            context_hidden=min(around, forward + backward),
            weights=weights,
            weights_hidden=hidden,
        )

    def products(self, number: int) -> tuple[float, float, float]:
        """Seconds of a period's products: forward, backward, and what of the forward remat repeats. Attention and
        experts, by their kernels, take as long as these do."""
        shards, split = self.shards, self.shards.split
        period, tokens, experts = split.work.periods[number], shards.tokens, split.experts[number]
        attention, of_attention = self.kernels.attention(tokens * split.attention[number])
        grouped, of_grouped = self.kernels.experts(experts.of(tokens))
        plain = tokens * (split.flops[number] - split.attention[number] - experts.flops) / self.kernels.rate
        weights = period.forward - period.attention  # FLOPs of a token in what multiplies weights
        width = 1 - period.narrow * period.forward / weights * (1 - 1 / EIGHT_BITS)
        times = (period.backward * period.forward - BACKWARD_PRODUCTS * period.attention) / weights
        forward, backward = width * (plain + grouped), width * times * (plain + of_grouped / 2)
        share, of_pairs, _ = split.again(number, shards.waits.computed)
        repeated = share * forward + of_pairs * attention
        return forward + attention, backward + of_attention, repeated

    def attention(self, number: int) -> float:
        """Seconds of a period's attention over pairs of tokens, forward and backward."""
        return sum(self.kernels.attention(self.shards.tokens * self.shards.split.attention[number]))

    def moved(self, number: int) -> float:
        """Bytes of a token through the memory in a period, besides its products'. An operand that is rounded is read
        for its scale and for its values, in the forward what comes in and in the backward the gradient of what left.
        Sums over the stream that the backward takes again read it once more. What lies between the parts of a split
        backward is written and read once more."""
        split = self.shards.split
        rounded = (
            split.work.periods[number].rounded_elements / split.size(split.tensor_axes) * (2 * split.work.compute + 1)
        )
        left = 2 * split.left(number, self.shards.waits.computed) if self.shards.splits else 0.0
        *_, summed = split.again(number, self.shards.waits.computed)
        again = summed * split.work.compute / split.stream_split
        return (
            PASSES * split.kept(number, "none") + again + rounded + left + self.merged(number) + self.reordered(number)
        )

    def merged(self, number: int) -> float:
        """Bytes of a token that the steps of a ring merge: outputs over a part of the keys, and gradients."""
        return RING_PASSES * self.context.merges * 4 * self.shards.split.queries[number]

    def reordered(self, number: int) -> float:
        """Bytes of a token's copies that are put in the order of their experts and back, forward and backward, read and
        written; where they are sent to other devices, in the order of these too. What remat repeats is there alone."""
        split, work = self.shards.split, self.shards.split.work
        times = 2 + split.again(number, self.shards.waits.computed)[0] / 2
        orders = 2 if split.expert_axes else 1
        moved = 4 * orders * times * split.experts[number].rows * work.embed * work.compute
        return moved / ROWS[split.placement.platform]

    @cached_property
    def context(self) -> Context:
        return Context(self.shards)

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.target.chip)

    @cached_property
    def in_rings(self) -> bool:
        """Whether what blocks gather and reduce goes in rings: where the stream is split as their products are."""
        split = self.shards.split
        return split.stream_split > 1 and set(split.tensor_axes) <= set(split.placement.overlap)

    def tensor(self, number: int, repeated: float) -> float:
        """Each branch of a block gathers its input and reduces its output over the mesh axes that split its widths, and
        the backward the other way round; with sequence parallelism the backward gathers the input once more. In rings
        (`Layout.overlap`) the products with weights run meanwhile."""
        split = self.shards.split
        gather = self.links.gather(split.tensor_axes, self.shards.stream)
        moves = 5 if split.stream_split > 1 else 4
        return split.reductions[number] * gather * (moves + 2 * repeated)

    def gathers(self, weights: list[Gathered], forward: float, backward: float) -> tuple[float, float]:
        """Weights gathered for the forward, and again for the backward, which reduces their gradients to parts; and of
        those seconds the ones during which the layer's products run."""
        gather = sum(self.links.gather(one.axes, one.size) for one in weights)
        scatter = sum(self.links.gather(one.axes, one.trained * self.shards.split.work.reduce) for one in weights)
        return 2 * gather + scatter, min(gather, forward) + min(gather + scatter, backward)

    # ---- the rest of a step ---------------------------------------------------------------------------------------

    def head(self) -> float:
        """The head and the loss of a microbatch."""
        split = self.shards.split
        return self.shards.tokens * split.work.head / split.placement.num_shards("vocab") / self.kernels.rate

    def pipeline(self) -> list[Line]:
        """What a step is longer for its stages: by ticks in which some wait, and by what is sent between them."""
        shards = self.shards
        if shards.split.stages == 1:
            return []
        run, layers = shards.run, self.layers
        forward = layers.forward + layers.others / 3
        inputs, weights = forward + layers.repeated, layers.backward - layers.forward + layers.others / 3
        costs = {
            Action.IDLE: 0.0,
            Action.FORWARD: forward,
            Action.BACKWARD: inputs + weights,
            Action.BACKWARD_INPUT: inputs,
            Action.BACKWARD_WEIGHT: weights,
        }
        ticks = sum(run.ticks[action] * cost for action, cost in costs.items()) / shards.virtual
        send = self.links.send(PIPE, shards.stream / shards.split.stream_split) * sum(run.ticks)
        bubble = max(0.0, ticks - layers.total * shards.layout.microbatches)
        return [Line(BUBBLE, bubble, 0.0, (PIPE,)), Line(STAGES, send, min(send, ticks), (PIPE,))]

    def gradients(self) -> float:
        """The one sum of gradients after the last microbatch, of those that no gather's reverse has summed; with ZeRO
        1 or 2 to parts, of which the updated parameters are gathered. ZeRO-2 sums in each microbatch, but on stages."""
        layout, split = self.shards.layout, self.shards.split
        scatters = layout.zero in (1, 2)
        sums = layout.microbatches if layout.zero == 2 and split.stages == 1 else 1
        total = 0.0
        for one, times in self.all_weights:
            size = times * one.trained * split.work.reduce
            total += sums * self.links.gather(one.summed, size) * (1 if scatters else 2)
            total += self.links.gather(one.summed, times * one.trained * 4) if scatters else 0.0
        return total

    def update(self) -> float:
        """Bytes of an update: what trains and the optimizer's state read and written once, gradients read; and of each
        microbatch after the first, but on stages, a sum of gradients: two read and one written."""
        split, micro = self.shards.split, self.shards.layout.microbatches
        sums = 3 * (micro - 1) if split.stages == 1 else 0
        return ((3 + sums) * split.gradients + 2 * split.state["optimizer"]) / self.target.chip.bandwidth

    def host(self) -> float:
        """State that lies on the host is fetched and sent back, one layer's while another's comes; parameters are
        fetched for the forward and the backward of each microbatch besides."""
        state, kinds = self.shards.split.state, away(self.shards.execution)
        weights = 2 * self.shards.layout.microbatches * state["parameters"] if "parameters" in kinds else 0.0
        return (sum(state[kind] for kind in kinds) + weights) / self.links.bandwidths.host

    def input(self, step: float) -> Line:
        """Token and target, 4 bytes each, go to the device while the step before runs."""
        once = 8 * self.shards.split.tokens / self.links.bandwidths.host
        return Line(INPUT, once, min(once, step))

    def saves(self, every: int | None) -> Line:
        """A checkpoint stops training while a device's state is copied to its host; files are written meanwhile."""
        split, kinds = self.shards.split, away(self.shards.execution)
        size = sum(size for kind, size in split.state.items() if kind not in kinds)
        return Line(SAVES, size / self.links.bandwidths.host / every if every else 0.0)

    def offloaded(self) -> Line:
        """Activations go to the host while the layers' forward runs, and come while their backward does."""
        shards, layers, micro = self.shards, self.layers, self.shards.layout.microbatches
        size = shards.tokens * sum(shards.periods(n) * shards.sent(n) for n in range(len(shards.split.work.periods)))
        once, forward = size / self.links.bandwidths.host, layers.forward + layers.others / 3
        hidden = min(once, forward) + min(once, layers.total - forward)
        return Line(OFFLOADED, 2 * once * micro, hidden * micro)

    @cached_property
    def all_weights(self) -> list[tuple[Gathered, float]]:
        """Weights of a layer, and how many layers have such; those around the layers."""
        split = self.shards.split
        layers = [(one, self.shards.periods(i)) for i, own in enumerate(split.weights) for one in own]
        return layers + [(one, 1.0) for one in split.outer]
