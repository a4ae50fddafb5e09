"""LEMON: lossless at any width and depth, with copies told apart."""

from lemonx.algebra.free_parameters import Free
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx.planning.policy import lemon as read


@method("lemon", paper="Wang et al., LEMON: Lossless Model Expansion, ICLR 2024")
def lemon(change: Change, free: Free) -> GrowthPolicy:
    """Lossless in width and depth at any size; copies are told apart, so all of them learn."""
    return read(change, free)
