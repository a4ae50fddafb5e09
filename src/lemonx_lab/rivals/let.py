"""Late-to-early training: a random target whose early blocks first learn what the source's last one writes."""

from lemonx.algebra.free_parameters import Free
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx_lab.rivals.scratch import fresh, unread

PAPER = "Zhao et al., Late-to-Early Training: LET LLMs Learn Earlier, So Faster and Better, ICLR 2026"


@method("let", paper=PAPER, make=fresh, inherits="early")
def let(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target whose early hidden states follow the source's last ones while training begins."""
    return unread(
        "train with inheritance early: task loss + a (1 - cosine of an early hidden state and the source's last), a "
        "from 0.1 linearly to 0 over the first quarter of the steps"
    )
