"""Methods that train a new target with a loss towards the source: knowledge inheritance, late-to-early training."""

from __future__ import annotations

from lemonx.algebra.free_parameters import Free
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx_lab.rivals.scratch import fresh, unread

KI_PAPER = "Qin et al., Knowledge Inheritance for Pre-trained Language Models, NAACL 2022"


@method("ki-soft", paper=KI_PAPER, make=fresh, inherits="soft")
def soft(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target that also learns the source's output distribution (KL loss) while it trains."""
    return unread(_note("soft", "KL divergence from the source's distribution"))


@method("ki-hard", paper=KI_PAPER, make=fresh, inherits="hard")
def hard(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target that also learns the source's most likely answer while it trains."""
    return unread(_note("hard", "cross-entropy to the source's argmax"))


def _note(kind: str, loss: str) -> str:
    return f"train with inheritance {kind}: (1 - a) task loss + a {loss}, a from 0.5 linearly to 0"


@method(
    "let",
    paper="Zhao et al., Late-to-Early Training: LET LLMs Learn Earlier, So Faster and Better, ICLR 2026",
    make=fresh,
    inherits="early",
)
def let(change: Change, free: Free) -> GrowthPolicy:
    """A newly initialised target whose early hidden states follow the source's last ones while training begins."""
    return unread(
        "train with inheritance early: task loss + a (1 - cosine of an early hidden state and the source's last), a "
        "from 0.1 linearly to 0 over the first quarter of the steps"
    )
