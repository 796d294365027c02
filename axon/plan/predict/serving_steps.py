"""Seconds of an engine's steps, without compiling them."""

from dataclasses import dataclass
from functools import cached_property

from flax import nnx

from axon.axes.patterns import base
from axon.chips import KERNEL_CHIPS
from axon.chips.target import Target
from axon.nn.capabilities import ChoosesExperts
from axon.plan.paged_attention import attention_time, pages_read
from axon.plan.predict.links import Bandwidths, Links
from axon.serve.program import ServingProgram

TENSOR = "tensor"
SHARE_OF_MEMORY = 0.65
"""How much of the memory's bandwidth a step reads weights at. (Fitted: docs/planner.md.)"""

SHARE_OF_KERNEL = 0.9
"""The same of experts' weights, which a kernel reads; what it moves besides are rows. (By a compiled step's bytes.)"""

ROUTING = 1.5e-4
"""Seconds in which a layer of experts chooses them and orders its rows, and of what else is small in it: some 100
operations that hardly depend on how much they move. (Fitted likewise.)"""


@dataclass(frozen=True)
class ServingSteps:
    """The steps of one engine, whose weights are split over mesh axis `tensor` of `target`.

    Args:
        program: of the engine. context: tokens that a request which writes has, on average.
    """

    program: ServingProgram
    target: Target
    bandwidths: Bandwidths
    context: int

    def parts(self, tokens: float, rows: float) -> dict[str, float]:
        """Part → seconds of a step with `tokens` tokens that reads the keys and values of `rows` requests.

        It is computed in the smallest compiled size that has room. Weights are read while products run, and the longer
        of the two counts; what chooses experts and orders their rows comes besides. No collective is hidden.
        """
        sizes = self.program.capacity.sizes()
        size = next((one for one in sizes if one.tokens >= tokens), sizes[-1])
        layers, head = self._flops
        logits_rows = min(size.tokens, max(size.rows, rows))
        products = (size.tokens * layers + logits_rows * head) / self._rate
        name = "products" if products > self._weights else "weights"
        sums = self._reductions * self._links.reduce((TENSOR,), size.tokens * self._width)
        logits = self._links.gather((TENSOR,), logits_rows * self._vocab)
        routing = {"routing": ROUTING * self._expert_layers} if self._expert_layers else {}
        return {
            name: max(products, self._weights),
            **routing,
            "attention": rows * self._row,
            "collectives": sums + logits,
        }

    def seconds(self, tokens: float, rows: float) -> float:
        """The sum of `parts`."""
        return sum(self.parts(tokens, rows).values())

    # ---- parts ----------------------------------------------------------------------------------------------------

    @cached_property
    def _links(self) -> Links:
        return Links(self.target, {TENSOR: self._tensor}, self.bandwidths)

    @property
    def _tensor(self) -> int:
        return self.program.runtime.placement.mesh.shape.get(TENSOR, 1)

    @cached_property
    def _flops(self) -> tuple[int, int]:
        """FLOPs of a token in the layers, which sees `context` others, and of a row of logits."""
        parts = self.program.runtime.module.flops_by_part(2 * self.context)  # whose queries see half of that
        return parts["layers"], parts["head"]

    @property
    def _rate(self) -> float:
        """FLOP/s of the engine's products."""
        return self.target.chip.peak * self.target.chip.sustained * self._tensor

    @cached_property
    def _weights(self) -> float:
        runtime, experts = self.program.runtime, 0
        for path, spec in runtime.parameters.items():
            if "experts" in spec.axes and not path.startswith("mtp/"):
                experts += runtime.placement.bytes_per_device(spec)
        others = self.program.read_bytes() - self.program.cached_bytes() - experts
        return (others / SHARE_OF_MEMORY + experts / SHARE_OF_KERNEL) / self.target.chip.bandwidth

    @cached_property
    def _expert_layers(self) -> int:
        """How many layers choose experts."""
        depth = self.program.runtime.module.layers
        routes = {
            k for k, one in depth.blocks.items() for _, m in nnx.iter_modules(one) if isinstance(m, ChoosesExperts)
        }
        return sum(span.times * sum(kind in routes for kind in span.kinds) for span in depth.spans)

    @cached_property
    def _row(self) -> float:
        """Seconds of a request's attention and states in a step."""
        program, chip = self.program, self.target.chip
        known = chip.name in KERNEL_CHIPS and chip.clock is not None
        pages = (
            attention_time(program, chip.name, self.context).total
            if known
            else pages_read(program, self.context) / chip.bandwidth
        )
        return (pages + program.state_bytes() / chip.bandwidth) / program.capacity.requests

    @cached_property
    def _reductions(self) -> int:
        """How many times a step sums the stream over `tensor`: after products over an axis that it splits."""
        runtime, found = self.program.runtime, 0
        for path, spec in runtime.declared.items():
            split = any(TENSOR in runtime.placement.mesh_axes(axis) for axis in spec.inputs)
            if split and base(spec.own[-1]) == "embed" and not path.startswith("mtp/"):
                found += spec.shape[0] if spec.stack else 1
        return found

    @property
    def _width(self) -> int:
        """Bytes of a token's stream."""
        runtime = self.program.runtime
        return runtime.module.dims["embed"] * runtime.compute_dtype.itemsize

    @property
    def _vocab(self) -> int:
        """Bytes of a row of logits."""
        runtime = self.program.runtime
        return runtime.module.dims["vocab"] * runtime.compute_dtype.itemsize
