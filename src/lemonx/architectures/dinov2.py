"""DINOv2."""

from lemonx.architectures.patches import count
from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm, scale
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, unscaled, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, linear, parameter

LAYER = "dinov2.encoder.layer.*"
SHOWN = ("out_features", "out_indices")  # the blocks whose streams a backbone gives out


@architecture(
    "dinov2",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    ffn_ratio="mlp_ratio",
    kind="vision",
    defaults={"layer_norm_eps": 1e-6, "mlp_ratio": 4, "num_channels": 3, "use_swiglu_ffn": False},
)
def dinov2(c: Config) -> Spec:
    """DINOv2: Pre-LN, a scale for every channel of a branch, MLP or SwiGLU."""
    width, heads, gated = c["hidden_size"], c["num_attention_heads"], c["use_swiglu_ffn"]
    tokens, hidden = count(c) + 1, int(width * c["mlp_ratio"])
    return Spec(
        stacks={"dinov2.encoder.layer": Stack(c["num_hidden_layers"], "residual", numbered=SHOWN)},
        eps="layer_norm_eps",
        prefix="dinov2.",
        config={"stage_names": stage_names(c)},
        spaces={
            "residual": avg(width, tokens),
            "normed": zero(width, tokens),
            "final": zero(width),
            "attended": unscaled(width, tokens),
            "computed": unscaled(width, tokens),
            "heads": circ(heads, tokens),
            **head(width // heads, positions=tokens),
            "hidden": circ((hidden * 2 // 3 + 7) // 8 * 8 if gated else hidden, tokens),
        },
        fixed={"channels": c["num_channels"]},
        rows=_rows("normed -> hidden + hidden" if gated else "normed -> hidden", gated),
    )


def stage_names(c: Config) -> list[str]:
    """What a backbone calls the streams in front of its blocks and behind each."""
    return ["stem", *(f"stage{i + 1}" for i in range(c.count("num_hidden_layers")))]


def _rows(up: str, gated: bool) -> dict[str, Row]:
    return {
        "dinov2.embeddings.cls_token": parameter("1 1 residual"),
        "dinov2.embeddings.mask_token": parameter("1 residual", optional=True),
        "dinov2.embeddings.position_embeddings": parameter("1 _ residual"),
        "dinov2.embeddings.patch_embeddings.projection": conv("channels -> residual"),
        f"{LAYER}.norm1": layer_norm("residual -> normed"),
        f"{LAYER}.attention.attention.query": linear("normed -> (heads query)"),
        f"{LAYER}.attention.attention.key": linear("normed -> (heads key)"),
        f"{LAYER}.attention.attention.value": linear("normed -> (heads value)"),
        f"{LAYER}.attention.output.dense": linear("(heads value) -> attended"),
        f"{LAYER}.layer_scale1": scale("attended -> residual", "lambda1"),
        f"{LAYER}.norm2": layer_norm("residual -> normed"),
        f"{LAYER}.mlp.{'weights_in' if gated else 'fc1'}": linear(up),
        f"{LAYER}.mlp.{'weights_out' if gated else 'fc2'}": linear("hidden -> computed"),
        f"{LAYER}.layer_scale2": scale("computed -> residual", "lambda1"),
        "dinov2.layernorm": layer_norm("residual -> final"),
        "classifier": linear("(2 final) -> _", optional=True),
    }
