"""SOLAR: depth up-scaling by two overlapping copies of the stack."""

from lemonx.algebra.free_parameters import Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, in_order, placed
from lemonx.specs.spec import Block, Stack


@method("solar", paper="Kim et al., SOLAR 10.7B: Effective yet Simple Depth Up-Scaling, NAACL 2024", grows=("depth",))
def solar(change: Change, free: Free) -> GrowthPolicy:
    """Two copies of the stack, the first without its last m blocks, the second without its first m: not lossless."""
    return placed(_overlapping)


def _overlapping(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    half, odd = divmod(target, 2)
    if target == stack.size:
        return in_order(range(target))
    if odd or half > stack.size or stack.pinned:
        most = 2 * stack.size
        raise Refused(
            f"solar joins two equal parts of the {stack.size} layers of {name}",
            f"try an even number of layers up to {most}",
        )
    return in_order([*range(half), *range(stack.size - half, stack.size)])
