"""SigLIP: both towers, or one of them."""

from lemonx.architectures.patches import count
from lemonx.architectures.rotary import head
from lemonx.architectures.tower import BOTH_SIZES, SIZES, TEXT_SIZES, Tower, encoder, joined, of_both, text
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm, unit_length
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, fresh, zero
from lemonx.specs.spec import Spec
from lemonx.specs.weights import conv, dropped, embedding, linear, parameter

TEXT = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 64, "layer_norm_eps": 1e-6}  # fmt: skip
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
          "num_channels": 3, "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6}  # fmt: skip


@architecture("siglip", **BOTH_SIZES, kind="vision", defaults=of_both(TEXT, VISION))
def siglip(c: Config) -> Spec:
    """SigLIP: a text and an image encoder, and the angle between what they find."""
    towers, channels = [_vision(c, "vision_config.")], c["vision_config.num_channels"]
    if c.is_a("ForImageClassification"):
        return joined(towers, {"classifier": linear("vision_final -> _", optional=True)}, channels=channels)
    # What the text is projected to is what the image's attention pooling gives.
    rows: dict[str, Row] = {
        "text_model.head": linear("text_final -> pooled"),
        "angle": unit_length("pooled -> pooled"),
        "logit_scale": parameter("1"),
        "logit_bias": parameter("1"),
    }
    config = {"text_config.projection_size": c["vision_config.hidden_size"]}
    return joined([*towers, text(c, "text_config.")], rows, config=config, channels=channels)


@architecture(
    "siglip_text_model",
    **TEXT_SIZES,
    projection="projection_size",
    kind="vision",
    defaults=TEXT | {"projection_size": None},
)
def siglip_text_model(c: Config) -> Spec:
    """SigLIP's text encoder."""
    size = c["projection_size"] or c["hidden_size"]
    rows: dict[str, Row] = {"text_model.head": linear("text_final -> projected")}
    config = {"projection_size": size}
    return joined([text(c, "")], rows, prefix="text_model.", spaces={"projected": fresh(size)}, config=config)


@architecture("siglip_vision_model", **SIZES, kind="vision", defaults=VISION)
def siglip_vision_model(c: Config) -> Spec:
    """SigLIP's image encoder, with attention pooling."""
    return joined([_vision(c, "")], {}, prefix="vision_model.", channels=c["num_channels"])


def _vision(c: Config, part: str) -> Tower:
    """An encoder of patches; a learned probe attends to what it finds."""
    tokens = count(c, part, square=True)
    made, eps, name = encoder(c, "vision", part, tokens), f"{part}layer_norm_eps", "vision_model"
    rows: dict[str, Row] = {
        f"{name}.embeddings.patch_embedding": conv("channels -> vision_residual"),
        f"{name}.embeddings.position_embedding": embedding("_ -> vision_residual"),
        f"{name}.embeddings.position_ids": dropped(),
        **made.rows,
        f"{name}.post_layernorm": layer_norm("vision_residual -> vision_final", eps=eps),
    }
    if c.maybe(f"{part}vision_use_head") is False:
        return Tower(made.spaces, rows, made.stacks)
    pooling: dict[str, Row] = {
        f"{name}.head.probe": parameter("1 1 vision_final"),
        f"{name}.head.attention.in_proj": linear(
            "vision_final -> (pool_heads pool_query) + (pool_heads pool_key) + (pool_heads pool_value)", joint=True
        ),
        f"{name}.head.attention.out_proj": linear("(pool_heads pool_value) -> pooled"),
        f"{name}.head.layernorm": layer_norm("pooled -> pool_normed", eps=eps),
        f"{name}.head.mlp.fc1": linear("pool_normed -> pool_hidden"),
        f"{name}.head.mlp.fc2": linear("pool_hidden -> pooled"),
    }
    return Tower(made.spaces | _pool(c, part, tokens), rows | pooling, made.stacks)


def _pool(c: Config, part: str, tokens: int) -> dict:
    width, heads = c[f"{part}hidden_size"], c[f"{part}num_attention_heads"]
    entries = head(width // heads, positions=tokens)
    return {
        "pooled": avg(width),
        "pool_normed": zero(width),
        "pool_heads": circ(heads, tokens),
        **{f"pool_{entry}": space for entry, space in entries.items()},
        "pool_hidden": circ(c[f"{part}intermediate_size"]),
    }
