"""Knowledge inheritance: a random target that is trained with a second loss, towards the source's predictions."""

from lemonx.algebra.free_parameters import Free
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx_lab.rivals.scratch import fresh, unread

PAPER = "Qin et al., Knowledge Inheritance for Pre-trained Language Models, NAACL 2022"


@method("ki-soft", paper=PAPER, make=fresh, inherits="soft")
def soft(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target that also learns the source's output distribution (KL loss) while it trains."""
    return unread(_note("soft", "KL divergence from the source's distribution"))


@method("ki-hard", paper=PAPER, make=fresh, inherits="hard")
def hard(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target that also learns the source's most likely answer while it trains."""
    return unread(_note("hard", "cross-entropy to the source's argmax"))


def _note(kind: str, loss: str) -> str:
    return f"train with inheritance {kind}: (1 - a) task loss + a {loss}, a from 0.5 linearly to 0"
