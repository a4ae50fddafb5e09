"""The entries of a head: how many there are, and which of them turn, as config.json says it."""

from dataclasses import replace

from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint, BadSizes
from lemonx.specs.config import Config
from lemonx.specs.spaces import Rotary, Space, key, query, values

PARTIAL = "partial_rotary_factor"
# Rules under which pair i of r turns as fast as pair m i of m r.
SCALABLE = ("default", "linear", "llama3")


def rotary(c: Config, head_dim: int, part: float | None = None, *, adjacent: bool = False, still: str = "") -> Rotary:
    """Which entries of a head turn; `part`: the share of them where the rule in config.json says no other.

    Without a `part`, the family's code turns whole heads, whatever config.json says. `still`: why no entry can be
    added, whatever the rule.
    """
    rope = c.maybe("rope_scaling") or c.maybe("rope_parameters") or {}
    # Gemma 3 and others have one rule for each type of layer.
    rules = [rule for rule in rope.values() if isinstance(rule, dict)] or [rope]
    shares = [1.0 if part is None else rule.get(PARTIAL) or part for rule in rules]
    kinds = [rule.get("rope_type") or rule.get("type") or "default" for rule in rules]
    for kind, rule in zip(kinds, rules, strict=True):
        if part is None and kind != "default" and (rule.get(PARTIAL) or c.maybe(PARTIAL) or 1.0) != 1.0:
            raise BadCheckpoint(
                f"has a {PARTIAL} beside {kind} rotary embeddings, and transformers cannot run this family with both",
                "remove the wrong one",
                file=CONFIG,
            )
    odd = [kind for kind, rule in zip(kinds, rules, strict=True)
           if kind not in SCALABLE and not (kind == "yarn" and rule.get("truncate") is False)]  # fmt: skip
    turning = int(head_dim * min(shares))
    if odd:
        still = still or f"the speeds of {odd[0]} rotary embeddings depend on the size of a head"
    elif turning % 2:
        still = still or f"{turning} of its entries turn, which make no whole pairs"
    return Rotary(turning, adjacent, still)


def head_width(c: Config, width: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    """How wide a head is where heads share the width; BadSizes if they cannot, which not every class notices."""
    if c[width] % c[heads]:
        found = f"{width.rpartition('.')[2]} {c[width]} is not a multiple of {c[heads]} heads"
        raise BadSizes(found, "choose another --width or --heads")
    return c[width] // c[heads]


CENTRED = "a LayerNorm reads the entries of every head, and new ones would be zeros, which move their mean"


def head(
    size: int,
    turns: Rotary | None = None,
    *,
    scale: float | None = None,
    normed: bool = False,
    centred: bool = False,
    positions: int = 1,
) -> dict[str, Space]:
    """The entries of a head's query, key and value; `normed`: a norm turns raw queries and keys into these.

    `centred`: that is a LayerNorm.
    """
    turns = turns or Rotary()
    raw = key(size, replace(turns, still=CENTRED) if centred else turns, normed=True, positions=positions)
    spaces = {
        "query": query(size, turns, scale=scale, positions=positions),
        "key": key(size, turns, normed=normed, positions=positions),
        "value": values(size, positions),
    }
    return {"raw_query": raw, "raw_key": raw, **spaces} if normed else spaces
