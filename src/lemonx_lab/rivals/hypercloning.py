"""HyperCloning: every width a whole multiple, copies with an even split, with or without noise."""

from dataclasses import replace

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, copies, kept

PAPER = "Samragh et al., Scaling Smart: Accelerating Pre-training with Small Model Initialization, 2024"


@method("hypercloning", paper=PAPER, grows=("width",))
def hypercloning(change: Change, free: Free) -> GrowthPolicy:
    """Whole multiples of the width, copies with an even split: lossless, forever symmetric."""
    return _policy(change, EVEN)


@method("hypercloning-noise", paper=PAPER, grows=("width",))
def hypercloning_noise(change: Change, free: Free) -> GrowthPolicy:
    """Whole multiples of the width, an even split and noise that sums to zero over copies: lossless."""
    return _policy(change, replace(EVEN, phi=free.phi, relative=free.relative))


def _policy(change: Change, free: Free) -> GrowthPolicy:
    for name, space in change.source.spaces.items():
        size = change.target.spaces[name].size
        if size % space.size:
            raise Refused(
                f"hypercloning only multiplies sizes by whole numbers, but {name} would grow from {space.size} to "
                f"{size}",
                f"try {space.size * 2}",
            )
    return GrowthPolicy(free, lossless=True, mode=kept, further=copies)
