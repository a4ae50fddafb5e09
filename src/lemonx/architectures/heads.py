"""What reads a decoder's last stream."""

from lemonx.modules import linear
from lemonx.rows import Row


def language_model(tied: str | None, final: str = "final") -> dict[str, Row]:
    """The next token, by the weight of the embedding `tied` if there is one; or what other classes ask for."""
    return {"lm_head": linear(f"{final} -> vocab", tied=tied, optional=True), **classifiers(final)}


def classifiers(final: str = "final") -> dict[str, Row]:
    """A class for the text or for every token, and where an answer begins and ends, by the names that classes use."""
    return {name: linear(f"{final} -> _", optional=True) for name in ("score", "classifier", "qa_outputs")}
