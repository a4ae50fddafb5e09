"""StackBERT: the stack on top of itself."""

from lemonx.algebra.free_parameters import Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, placed, stacked

PAPER = "Gong et al., Efficient Training of BERT by Progressively Stacking, ICML 2019"


@method("stackbert", paper=PAPER, grows=("depth",))
def stackbert(change: Change, free: Free) -> GrowthPolicy:
    """The whole stack again on top of itself, which doubles the depth: not lossless."""
    for name, stack in change.source.stacks.items():
        size = change.target.stacks[name].size
        if size not in (stack.size, 2 * stack.size):
            raise Refused(
                f"stackbert doubles the {stack.size} layers of {name} in each stage", f"try {2 * stack.size} layers"
            )
    return placed(stacked)
