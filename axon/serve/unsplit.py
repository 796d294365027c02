"""A placement for inference: few sequences, of which some axes are not split."""

from dataclasses import replace

from axon.axes.patterns import base
from axon.layout import Placement


def unsplit(placement: Placement, *names: str) -> Placement:
    """Nothing split along the axes `names`, of which `seq` is one, or their roles, as `seq.residual`; and those that
    generation and scores see whole."""
    layout = placement.layout
    whole = {name for name in layout.rows if base(name) in names}
    whole |= {*names, "vocab.whole", "head_dim.whole", "key_latent.whole"}
    return Placement(replace(layout, rows={**layout.rows, **dict.fromkeys(whole)}, context=None), placement.mesh)
