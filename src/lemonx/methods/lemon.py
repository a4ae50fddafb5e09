"""LEMON: lossless at any width and depth, with copies that can learn different things."""

from lemonx.algebra.free_parameters import Free
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx.planning.policy import lemon as read


@method("lemon", paper="Wang et al., LEMON: Lossless Model Expansion, ICLR 2024")
def lemon(change: Change, free: Free) -> GrowthPolicy:
    """Lossless in width and depth at any size; copies of a unit differ, so each of them can learn."""
    return read(change, free)
