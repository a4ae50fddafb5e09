"""G_stack: the whole stack repeated."""

from lemonx.algebra.free_parameters import Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, placed, stacked


@method("gstack", paper="Du et al., Stacking Your Transformers (G_stack), NeurIPS 2024", grows=("depth",))
def gstack(change: Change, free: Free) -> GrowthPolicy:
    """The whole stack repeated a whole number of times: not lossless."""
    for name, stack in change.source.stacks.items():
        if change.target.stacks[name].size % stack.size:
            sizes = f"{2 * stack.size} or {3 * stack.size}"
            raise Refused(f"gstack repeats the {stack.size} layers of {name} a whole number of times", f"try {sizes}")
    return placed(stacked)
