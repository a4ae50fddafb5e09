"""Blocks that read another model's stream besides their own."""

from lemonx.errors import Refused
from lemonx.specs.config import Config


def refuse_memory(c: Config) -> None:
    """Refused where config.json says so: how wide that stream becomes is not for this model to say."""
    if c.maybe("add_cross_attention"):
        raise Refused(
            "add_cross_attention is true, which lemonx does not support in this family",
            "expand a model where it is false",
        )
