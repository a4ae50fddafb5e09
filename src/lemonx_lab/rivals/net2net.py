"""Net2Net: copies of units with an even split, identity blocks."""

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, copies, silenced

# A LayerNorm needs the same number of copies of every unit; at other widths the method is not lossless.
CIRCULAR = (("avg", "circ"), ("zero", "circ"), ("scaled", "circ"))


@method(
    "net2net", paper="Chen, Goodfellow and Shlens, Net2Net: Accelerating Learning via Knowledge Transfer, ICLR 2016"
)
def net2net(change: Change, free: Free) -> GrowthPolicy:
    """Copies with an even split and identity blocks: lossless where widths are multiples, forever symmetric.

    The paper draws the units to copy at random and adds identity layers. Here units are copied in turn, which makes the
    method lossless under LayerNorm at multiples, and the identity layer of a residual network is a silent block.
    """
    return GrowthPolicy(EVEN, lossless=change.whole_streams, mode=silenced, further=copies, kinds=CIRCULAR)
