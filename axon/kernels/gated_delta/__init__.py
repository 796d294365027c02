"""The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv:2412.06464): a state that is decayed, corrected and read.

Of each head a state S, `key_dim value_dim`, follows the tokens of a document: S ← α·S, then S ← S + k·(β·(v − Sᵀ·k))ᵀ,
and the output is Sᵀ·q. `reference` is this loop over tokens; `chunked` computes chunks of them by matrix
products, also where the state before them is not known yet.
"""

from axon.kernels.gated_delta.chunked import gated_delta, gated_delta_run
from axon.kernels.gated_delta.reference import delta_step, gated_delta_reference

__all__ = ["delta_step", "gated_delta", "gated_delta_reference", "gated_delta_run"]
