"""bert2BERT's advanced knowledge initialisation (AKI): rows from the next block; depth by stacking."""

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.methods import method
from lemonx.planning.policy import COPY, NEXT, Change, GrowthPolicy, kept, stacked
from lemonx.specs.spec import Block
from lemonx_lab.rivals.net2net import CIRCULAR


@method("aki", paper="Chen et al., bert2BERT: Towards Reusable Pretrained Language Models, ACL 2022")
def aki(change: Change, free: Free) -> GrowthPolicy:
    """Further rows of every weight come from the next block: not lossless, not symmetric; stacked depth."""
    return GrowthPolicy(EVEN, lossless=False, mode=kept, further=_from_next, arrange=stacked, kinds=CIRCULAR)


def _from_next(block: Block, mode: str) -> tuple[str, ...]:
    # The last block has none above it, and copies its own as FPI does.
    return (NEXT, COPY)
