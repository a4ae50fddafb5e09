"""Methods that widen by copying units: Net2Net, FPI and AKI (bert2BERT), HyperCloning, staged training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.algebra.recipes import KEEP, SILENT
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning import depth
from lemonx.planning.policy import COPY, NEXT, Change, GrowthPolicy, copies, kept, silenced, stacked
from lemonx.specs.norms import BatchNorm, Norm
from lemonx.specs.rows import UNBIASED, Row
from lemonx.specs.spec import Block

# A LayerNorm needs the same number of copies of every unit; at other widths the method is not lossless.
CIRCULAR = (("avg", "circ"), ("zero", "circ"), ("scaled", "circ"))
# Plain copies in every block. The second one also stacks blocks.
lossy = partial(GrowthPolicy, EVEN, lossless=False, mode=kept, further=copies)
lossy_stacked = partial(lossy, arrange=stacked, kinds=CIRCULAR)


NET2NET_PAPER = "Chen, Goodfellow and Shlens, Net2Net: Accelerating Learning via Knowledge Transfer, ICLR 2016"


@method("net2net", paper=NET2NET_PAPER)
def net2net(change: Change, free: Free) -> GrowthPolicy:
    """Copies with an even split and identity blocks: lossless where widths are multiples, forever symmetric.

    The paper draws the units to copy at random and adds identity layers. Here units are copied in turn, which makes the
    method lossless under LayerNorm at multiples, and the identity layer of a residual network is a silent block.
    """
    return GrowthPolicy(EVEN, lossless=change.whole_streams, mode=silenced, further=copies, kinds=CIRCULAR)


@method("fpi", paper="Chen et al., bert2BERT: Towards Reusable Pretrained Language Models, ACL 2022")
def fpi(change: Change, free: Free) -> GrowthPolicy:
    """Copies with an even split: lossless at whole multiples of the width, symmetric; stacked depth is lossy."""
    lossless = change.whole_streams and not change.deepens
    return lossy_stacked(lossless=lossless)


@method("aki", paper="Chen et al., bert2BERT: Towards Reusable Pretrained Language Models, ACL 2022")
def aki(change: Change, free: Free) -> GrowthPolicy:
    """Further rows of every weight come from the next block: not lossless, not symmetric; stacked depth."""
    return lossy_stacked(further=_from_next)


def _from_next(block: Block, mode: str) -> tuple[str, ...]:
    # The last block has none above it, and copies its own as FPI does.
    return (NEXT, COPY)


HYPERCLONING_PAPER = "Samragh et al., Scaling Smart: Accelerating Pre-training with Small Model Initialization, 2024"


@method("hypercloning", paper=HYPERCLONING_PAPER, grows=("width",))
def hypercloning(change: Change, free: Free) -> GrowthPolicy:
    """Whole multiples of the width, copies with an even split: lossless, forever symmetric."""
    return _policy(change, EVEN)


@method("hypercloning-noise", paper=HYPERCLONING_PAPER, grows=("width",))
def hypercloning_noise(change: Change, free: Free) -> GrowthPolicy:
    """Whole multiples of the width, an even split and noise that sums to zero over copies: lossless."""
    return _policy(change, replace(EVEN, phi=free.phi, relative=free.relative))


def _policy(change: Change, free: Free) -> GrowthPolicy:
    for name, space in change.source.spaces.items():
        size = change.target.spaces[name].size
        if size % space.size:
            why = f"but {name} would grow from {space.size} to {size}"
            raise Refused(f"hypercloning only multiplies sizes by whole numbers, {why}", f"try {space.size * 2}")
    return GrowthPolicy(free, lossless=True, mode=kept, further=copies)


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
