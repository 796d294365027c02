"""Expert parallelism: tokens are sent to their experts, and what these make of them comes back.

Three regions over global arrays, one after the other and none inside of another: dispatch (copies of tokens, sorted by
expert, exchanged over the mesh axes that split both), the experts' products (`axon.kernels.grouped_matmul`, each weight
through the one door), and combine. GShard (Lepikhin et al., arXiv:2006.16668) has the exchange, MegaBlocks (Gale et
al., arXiv:2211.15841) products without padding.
"""

from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.local import Local
from axon.parallel.expert.padded import Padded
from axon.parallel.expert.product import LowRank, Matrix, Products, sent_format
from axon.parallel.expert.ragged import Ragged
from axon.parallel.expert.rounds import through_experts
from axon.parallel.expert.sent_rows import SentRows

__all__ = [
    "ExpertMesh",
    "Local",
    "LowRank",
    "Matrix",
    "Padded",
    "Products",
    "Ragged",
    "SentRows",
    "sent_format",
    "through_experts",
]
