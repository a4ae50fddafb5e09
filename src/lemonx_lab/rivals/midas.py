"""MIDAS: the blocks in the middle once more, as they are."""

from lemonx.algebra.free_parameters import Free
from lemonx.methods import method
from lemonx.planning import depth
from lemonx.planning.policy import Change, GrowthPolicy, in_order, placed
from lemonx.specs.spec import Block, Stack

PAPER = "Saunshi et al., On the Inductive Bias of Stacking Towards Improving Reasoning, NeurIPS 2024"


@method("midas", paper=PAPER, grows=("depth",))
def midas(change: Change, free: Free) -> GrowthPolicy:
    """Copies of the blocks in the middle behind themselves, gradually over several stages: not lossless."""
    return placed(_middle, "the paper adds a few blocks in each of several stages")


def _middle(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    return in_order(block.source for block in depth.PLACEMENTS["middle"](name, stack, target))
