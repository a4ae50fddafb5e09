"""MSLT, multi-stage layerwise training: copies of the top blocks on top."""

from lemonx.algebra.free_parameters import Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, in_order, placed
from lemonx.specs.spec import Block, Stack


@method("mslt", paper="Yang et al., Progressively Stacking 2.0: Multi-stage Layerwise Training, 2020", grows=("depth",))
def mslt(change: Change, free: Free) -> GrowthPolicy:
    """Copies of the top blocks on top; these are trained first, with the others frozen, then all: not lossless."""
    frozen = ", ".join(f"{name}.0 to {name}.{stack.size - 1}" for name, stack in change.source.stacks.items())
    return placed(_top_again, f"stage 1: freeze the embeddings and {frozen}; last stage: train all")


def _top_again(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    added = target - stack.size
    if added > stack.size - stack.pinned:
        most = 2 * stack.size - stack.pinned
        raise Refused(
            f"mslt copies each of the {stack.size} layers of {name} at most once per stage",
            f"try at most {most} layers",
        )
    return in_order([*range(stack.size), *range(stack.size - added, stack.size)])
