"""Mamba."""

import math

from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.spaces import circ, fresh, key, query, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import depthwise, embedding, linear, parameter

LAYER = "backbone.layers.*"
# A flag for new models that transformers obeys whenever it loads one, so what a block writes depends on the depth.
RESCALED = "rescale_prenorm_residual divides what a block writes by the root of it whenever the model is loaded"


@architecture(
    "mamba",
    width="hidden_size",
    depth="num_hidden_layers",
    ffn_ratio="expand",
    vocab="vocab_size",
    state="state_size",
    rank="time_step_rank",
    kind="language",
    defaults={"expand": 2, "state_size": 16, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
              "time_step_rank": None, "rescale_prenorm_residual": False},
)  # fmt: skip
def mamba(c: Config) -> Spec:
    """Mamba: RMSNorm, a gated convolution and a selective state for every channel."""
    width, inner = c["hidden_size"], int(c["expand"] * c["hidden_size"])
    rank = math.ceil(width / 16) if c["time_step_rank"] in (None, "auto") else c["time_step_rank"]
    tied = "backbone.embeddings" if c["tie_word_embeddings"] and not c.headless else None
    return Spec(
        stacks={"backbone.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_epsilon",
        prefix="backbone.",
        config={"intermediate_size": inner, "time_step_rank": rank},
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "final")},
            "inner": circ(inner),
            "rank": circ(rank),
            # A new state takes in anything, and nothing is read from it yet.
            "state_in": key(c["state_size"]),
            "state_out": query(c["state_size"], scale=1.0),
            "vocab": fresh(c["vocab_size"]),
        },
        fixed={"depth": c["num_hidden_layers"]} if c["rescale_prenorm_residual"] else {},
        still={"depth": RESCALED},
        rows={
            "backbone.embeddings": embedding("vocab -> residual"),
            f"{LAYER}.norm": rms_norm("residual -> normed"),
            f"{LAYER}.mixer.in_proj": linear("normed -> inner + inner"),
            f"{LAYER}.mixer.conv1d": depthwise("inner -> inner", kernel=1),
            f"{LAYER}.mixer.x_proj": linear("inner -> rank + state_in + state_out"),
            f"{LAYER}.mixer.dt_proj": linear("rank -> inner"),
            f"{LAYER}.mixer.A_log": parameter("inner state_in"),
            f"{LAYER}.mixer.D": parameter("inner"),
            f"{LAYER}.mixer.out_proj": linear("inner -> residual"),
            "backbone.norm_f": rms_norm("residual -> final"),
            "lm_head": linear("final -> vocab", tied=tied, optional=True),
        },
    )
