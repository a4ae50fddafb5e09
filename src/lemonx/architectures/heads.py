"""What reads the last stream, by the names that transformers' classes have for it."""

from collections.abc import Sequence

from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, zero
from lemonx.specs.weights import conv, linear


def language_model(tied: str | None, final: str = "final") -> dict[str, Row]:
    """The next token, by the weight of the embedding `tied` if there is one; or what other classes ask for."""
    return {"lm_head": linear(f"{final} -> vocab", tied=tied, optional=True), **classifiers(final)}


def classifiers(final: str = "final") -> dict[str, Row]:
    """A class for the text or for every token, and where an answer begins and ends, by the names that classes use."""
    return {name: linear(f"{final} -> _", optional=True) for name in ("score", "classifier", "qa_outputs")}


def images(final: str = "final") -> dict[str, Row]:
    """A class for the image, or the pixels of every patch that was masked."""
    return {
        "classifier": linear(f"{final} -> _", optional=True),
        "decoder.0": conv(f"{final} -> _", optional=True),
    }


def backbone(widths: Sequence[int], eps: float) -> tuple[dict[str, Space], dict[str, Row]]:
    """Norms of the streams that a backbone gives out, in front of its stages and behind each; nobody reads these."""
    streams = {"stem": 0, **{f"stage{i + 1}": i for i in range(len(widths))}}
    spaces: dict[str, Space] = {f"shown_{name}": zero(widths[i]) for name, i in streams.items()}
    rows: dict[str, Row] = {
        f"hidden_states_norms.{name}": layer_norm(f"stage{i} -> shown_{name}", eps=eps, optional=True)
        for name, i in streams.items()
    }
    return spaces, rows
