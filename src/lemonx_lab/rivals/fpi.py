"""bert2BERT's function-preserving initialisation (FPI): copies with an even split; depth by stacking."""

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, copies, kept, stacked
from lemonx_lab.rivals.net2net import CIRCULAR


@method("fpi", paper="Chen et al., bert2BERT: Towards Reusable Pretrained Language Models, ACL 2022")
def fpi(change: Change, free: Free) -> GrowthPolicy:
    """Copies with an even split: lossless at whole multiples of the width, symmetric; stacked depth is lossy."""
    lossless = change.whole_streams and not change.deepens
    return GrowthPolicy(EVEN, lossless=lossless, mode=kept, further=copies, arrange=stacked, kinds=CIRCULAR)
