"""StackBERT: the stack on top of itself."""

from lemonx.algebra.free_parameters import Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, placed, stacked

PAPER = "Gong et al., Efficient Training of BERT by Progressively Stacking, ICML 2019"


@method("stackbert", paper=PAPER, grows=("depth",))
def stackbert(change: Change, free: Free) -> GrowthPolicy:
    """The whole stack once more on top of itself, doubling the depth: not lossless."""
    for name, stack in change.source.stacks.items():
        size = change.target.stacks[name].size
        if size not in (stack.size, 2 * stack.size):
            raise Refused(f"stackbert doubles the {stack.size} blocks of {name}, stage by stage: try {2 * stack.size}")
    return placed(stacked)
