"""BEiT and Data2Vec for images."""

from lemonx.architectures.dinov2 import SHOWN, stage_names
from lemonx.architectures.patches import count
from lemonx.architectures.rotary import head
from lemonx.architectures.vit import block
from lemonx.errors import Refused
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm, scale
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, unscaled, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, dropped, linear, parameter

TABLE, INDEX = (f"relative_position_bias.relative_position_{what}" for what in ("bias_table", "index"))


@architecture(
    "beit",
    "data2vec-vision",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    ffn="intermediate_size",
    kind="vision",
    defaults={"layer_norm_eps": 1e-12, "num_channels": 3, "layer_scale_init_value": 0.1, "use_mean_pooling": True},
)
def beit(c: Config) -> Spec:
    """BEiT, Data2Vec: Pre-LN, queries and values with biases, relative positions, a scale for every channel."""
    if c.is_a("ForSemanticSegmentation") or c.maybe("add_fpn"):
        raise Refused(
            "lemonx does not support the layers that make a pyramid of feature maps",
            "expand the base model without them, which AutoModel.from_pretrained(...).save_pretrained(...) saves",
        )
    width, heads, scaled = c["hidden_size"], c["num_attention_heads"], c["layer_scale_init_value"] > 0
    name, tokens = c["model_type"].replace("-", "_"), count(c) + 1
    attended, computed = ("attended", "computed") if scaled else ("residual", "residual")
    return Spec(
        stacks={f"{name}.encoder.layer": Stack(c["num_hidden_layers"], "residual", numbered=SHOWN)},
        eps="layer_norm_eps",
        prefix=f"{name}.",
        config={"stage_names": stage_names(c)} if name == "beit" else {},
        spaces={
            "residual": avg(width, tokens),
            "normed": zero(width, tokens),
            "final": zero(width),
            **({space: unscaled(width, tokens) for space in (attended, computed)} if scaled else {}),
            "heads": circ(heads, tokens),
            **head(width // heads, positions=tokens),
            "hidden": circ(c["intermediate_size"], tokens),
        },
        fixed={"channels": c["num_channels"]},
        rows={
            f"{name}.embeddings.cls_token": parameter("1 1 residual"),
            f"{name}.embeddings.mask_token": parameter("1 1 residual", optional=True),
            f"{name}.embeddings.position_embeddings": parameter("1 _ residual", optional=True),
            f"{name}.embeddings.patch_embeddings.projection": conv("channels -> residual"),
            f"{name}.encoder.{TABLE}": parameter("_ heads", optional=True),
            f"{name}.encoder.{INDEX}": dropped(),
            **_block(f"{name}.encoder.layer.*", attended, computed),
            **_head(c, name),
        },
    )


def _block(layer: str, attended: str, computed: str) -> dict[str, Row]:
    scales: dict[str, Row] = {
        f"{layer}.lambda_1": scale("attended -> residual"),
        f"{layer}.lambda_2": scale("computed -> residual"),
    }
    return {
        **block(layer, attended, computed),
        f"{layer}.attention.attention.{TABLE}": parameter("_ heads", optional=True),
        f"{layer}.attention.attention.{INDEX}": dropped(),
        **(scales if attended == "attended" else {}),
    }


def _head(c: Config, name: str) -> dict[str, Row]:
    """A norm of the mean over patches, or of every token; the masked images' head has a norm of its own."""
    masked = c.is_a("ForMaskedImageModeling")
    return {
        f"{name}.layernorm": layer_norm(f"residual -> {'residual' if masked else 'final'}", optional=True),
        f"{name}.pooler.layernorm": layer_norm("residual -> final", optional=True),
        "layernorm": layer_norm("residual -> final", optional=True),
        "lm_head": linear("final -> _", optional=True),
        "classifier": linear("final -> _", optional=True),
    }
