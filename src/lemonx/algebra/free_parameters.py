"""The free parameters: what losslessness leaves open, as named presets.

Paper: appendix C.4, parameter choices. There D_T <= 2 D_S; with k copies of a unit, copies 2..k take what
the paper gives to W_2 (or W_res), and the first copy takes the rest, so that they always sum to W.
"""

from __future__ import annotations

from dataclasses import dataclass

from lemonx.errors import BadTarget


@dataclass(frozen=True)
class Free:
    """How copies come to differ, how unread entries are filled, and how added blocks are silenced.

    Fan-out of the further copies of a unit:  W_c = split W/k + Phi;  Phi ~ N(0, phi^2).  The first copy takes the
    rest: split 1 is even, 0 leaves all on the first, between them it is uneven.
    Weights that read zeros (col-rand):       zeta ~ N(0, zeta^2).
    Norm weights on coordinates that are 0:   zeta ~ U(-norm_zeta, norm_zeta).
    Added blocks:  type 1 writes zeros; type 2 writes copies that cancel, with fan-out N(0, cancel^2).
    `append_next`: in type 1, further heads and neurons come from the next layer instead of being copies.
    `small_gains`: norms of added Post-LN blocks lose less to eps, and write a small stream (algebra/norm_chains.py).
    `stacked`: added blocks stand on top of the source's, in its order, instead of each next to its origin.
    """

    name: str
    split: float
    phi: float
    depth_type: int
    append_next: bool = False
    zeta: float = 0.02
    norm_zeta: float = 1.0
    cancel: float = 0.02
    stacked: bool = False
    small_gains: bool = False

    def share(self, copies: int) -> float:
        """The part of W that each further copy takes, before Phi."""
        return self.split / copies


PRESETS = {
    "vision": Free("vision", split=1.0, phi=0.02, depth_type=2),
    "language": Free("language", split=0.0, phi=0.002, depth_type=1, append_next=True),
}

# All of the weight on one copy. With all else equal it ends better than an even split on a ViT, a BERT and a Llama,
# each by more than the noise of its seeds, and nothing else that was tried beats it on all three (`lemonx compare
# free-parameters`, free-parameters-vit, free-parameters-bert). The paper has it for language alone.
DEFAULT = "language"

# What the methods before LEMON do: copies share evenly, and stay identical.
EVEN = Free("even", split=1.0, phi=0.0, depth_type=1, zeta=0.0)


def preset(name: str) -> Free:
    if name not in PRESETS:
        raise BadTarget(f"there is no preset {name!r} of free parameters", f"choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
