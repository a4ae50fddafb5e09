"""Mamba 2."""

from lemonx.architectures.mamba import RESCALED
from lemonx.errors import BadTarget
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import CALM, Rotary, circ, fresh, grouped, key, query, silent, unread, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import depthwise, embedding, linear, parameter

LAYER = "backbone.layers.*"
MIXED = "(heads entries) + (groups state_in) + (groups state_out)"


@architecture(
    "mamba2",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_heads",
    head_dim="head_dim",
    vocab="vocab_size",
    expand="expand",
    groups="n_groups",
    state="state_size",
    kind="language",
    defaults={"expand": 2, "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128,
              "layer_norm_epsilon": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
              "rescale_prenorm_residual": False},
)  # fmt: skip
def mamba2(c: Config) -> Spec:
    """Mamba 2: heads with a selective state each, in groups, and an RMSNorm behind the gate."""
    width, heads, entries = c["hidden_size"], c["num_heads"], c["head_dim"]
    if c["expand"] * width != heads * entries:
        raise BadTarget(
            f"hidden_size {width} times expand {c['expand']} must be num_heads {heads} times head_dim {entries}",
            "set the others with --set",
        )
    calm, still = c["hidden_act"] in CALM, ""
    if not calm:
        still = f"hidden_act {c['hidden_act']!r} does not take zero to zero, and new entries of a state must be zero"
    tied = "backbone.embeddings" if c["tie_word_embeddings"] and not c.headless else None
    return Spec(
        stacks={"backbone.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_epsilon",
        prefix="backbone.",
        # The norm behind the gate needs copies of equal energy: heads that are left over are silent, their gates open.
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "final")},
            "groups": circ(c["n_groups"]),
            "heads": grouped(heads, under="groups", kind="zero", calm=calm),
            "entries": silent(entries, calm=calm),
            "gates": grouped(heads, under="groups", kind="rand"),
            "gate_entries": unread(entries),
            "gated_heads": grouped(heads, under="groups", kind="zero"),
            "gated_entries": zero(entries),
            "state_in": query(c["state_size"], Rotary(still=still), scale=1.0),
            "state_out": key(c["state_size"], Rotary(still=still)),
            "vocab": fresh(c["vocab_size"]),
        },
        acts=("heads", "entries"),
        fixed={"depth": c["num_hidden_layers"]} if c["rescale_prenorm_residual"] else {},
        still={"depth": RESCALED},
        rows={**_rows(), "lm_head": linear("final -> vocab", tied=tied, optional=True)},
    )


def _rows() -> dict[str, Row]:
    return {
        "backbone.embeddings": embedding("vocab -> residual"),
        f"{LAYER}.norm": rms_norm("residual -> normed"),
        f"{LAYER}.mixer.in_proj": linear(f"normed -> (gates gate_entries) + {MIXED} + heads"),
        f"{LAYER}.mixer.conv1d": depthwise(f"{MIXED} -> {MIXED}", kernel=1),
        **{f"{LAYER}.mixer.{name}": parameter("heads") for name in ("A_log", "D", "dt_bias")},
        f"{LAYER}.mixer.norm": rms_norm("(heads entries) -> (gated_heads gated_entries)"),
        f"{LAYER}.mixer.out_proj": linear("(gated_heads gated_entries) -> residual"),
        "backbone.norm_f": rms_norm("residual -> final"),
    }
