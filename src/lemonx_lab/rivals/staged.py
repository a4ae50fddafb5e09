"""Staged training: width doubled by copies with halves, depth doubled by blocks whose norms are silent."""

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.algebra.recipes import KEEP, SILENT
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning import depth
from lemonx.planning.policy import Change, GrowthPolicy, copies
from lemonx.specs.norms import BatchNorm, Norm
from lemonx.specs.rows import UNBIASED, Row
from lemonx.specs.spec import Block


@method("staged", paper="Shen et al., Staged Training for Transformer Language Models, ICML 2022")
def staged(change: Change, free: Free) -> GrowthPolicy:
    """Doubles width by copies with half the weight and depth by identity blocks: lossless, forever symmetric.

    In an added block the norms of its branches are zero and so are all biases, so that the branches write nothing.
    """
    sizes = {**change.source.spaces, **change.source.stacks}
    targets = {**change.target.spaces, **change.target.stacks}
    for name, old in sizes.items():
        if targets[name].size not in (old.size, 2 * old.size):
            wrong = f"{name} goes from {old.size} to {targets[name].size}"
            raise Refused(f"staged doubles a size or keeps it, but {wrong}", f"try {2 * old.size}")
    return GrowthPolicy(EVEN, lossless=True, mode=_silent_norms, further=copies)


def _silent_norms(row: Row, last_norm: bool, stream: str, block: Block) -> str:
    if not block.added:
        return KEEP
    if depth.in_stream(row, stream):
        raise Refused(
            "staged zeroes the norm in front of attention and MLP, and a Post-LN layer has none there",
            "use --method lemon",
        )
    return SILENT if isinstance(row, Norm | BatchNorm) and stream in row.touches else UNBIASED
