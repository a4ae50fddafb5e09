"""CLIP: both towers, or one of them."""

from lemonx.architectures.patches import count
from lemonx.architectures.tower import BOTH_SIZES, SIZES, TEXT_SIZES, Tower, encoder, joined, of_both, text
from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import Refused
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm, unit_length
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, projection
from lemonx.specs.spec import Spec
from lemonx.specs.weights import conv, dropped, embedding, linear, parameter

TEXT = {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 8, "max_position_embeddings": 77, "layer_norm_eps": 1e-5}  # fmt: skip
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
          "num_channels": 3, "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-5}  # fmt: skip
WIDTH = {"projection_dim": 512}


@architecture("clip", **BOTH_SIZES, projection="projection_dim", kind="vision", defaults=of_both(TEXT, VISION) | WIDTH)
def clip(c: Config) -> Spec:
    """CLIP: a text and an image encoder, and the angle between what they find."""
    for old in ("text_config_dict", "vision_config_dict"):
        if c.maybe(old):
            raise Refused(f"has a {old} beside the newer field", "save the model again with transformers", file=CONFIG)
    towers = [_vision(c, "vision_config.")]
    if c.is_a("ForImageClassification"):
        rows: dict[str, Row] = {"classifier": linear("vision_residual -> _", optional=True)}
        projected, widths = {}, {}
    else:
        towers.append(text(c, "text_config."))
        rows = {
            "text_projection": linear("text_final -> projected"),
            "visual_projection": linear("vision_final -> projected"),
            "angle": unit_length("projected -> projected"),
            "logit_scale": parameter(""),
        }
        projected = {"projected": projection(c["projection_dim"])}
        widths = {f"{part}.projection_dim": c["projection_dim"] for part in ("text_config", "vision_config")}
    return joined(towers, rows, config=widths, spaces=projected, channels=c["vision_config.num_channels"])


@architecture("clip_text_model", **TEXT_SIZES, projection="projection_dim", kind="vision", defaults=TEXT | WIDTH)
def clip_text_model(c: Config) -> Spec:
    """CLIP's text encoder, with or without its projection."""
    rows: dict[str, Row] = {"text_projection": linear("text_final -> projected", optional=True)}
    spaces = {"projected": projection(c["projection_dim"])}
    return joined([text(c, "")], rows, prefix="text_model.", spaces=spaces)


@architecture("clip_vision_model", **SIZES, projection="projection_dim", kind="vision", defaults=VISION | WIDTH)
def clip_vision_model(c: Config) -> Spec:
    """CLIP's image encoder, with or without its projection."""
    rows: dict[str, Row] = {"visual_projection": linear("vision_final -> projected", optional=True)}
    spaces = {"projected": projection(c["projection_dim"])}
    return joined([_vision(c, "")], rows, prefix="vision_model.", spaces=spaces, channels=c["num_channels"])


def _vision(c: Config, part: str) -> Tower:
    """An encoder of patches and a class token; a LayerNorm in front of it feeds the stream."""
    tokens = count(c, part, square=True) + 1
    made, eps = encoder(c, "vision", part, tokens), f"{part}layer_norm_eps"
    rows: dict[str, Row] = {
        "vision_model.embeddings.class_embedding": parameter("vision_embedded"),
        "vision_model.embeddings.patch_embedding": conv("channels -> vision_embedded"),
        "vision_model.embeddings.position_embedding": embedding("_ -> vision_embedded"),
        "vision_model.embeddings.position_ids": dropped(),
        "vision_model.pre_layrnorm": layer_norm("vision_embedded -> vision_residual", eps=eps),
        "vision_model.post_layernorm": layer_norm("vision_residual -> vision_final", eps=eps),
    }
    return Tower(made.spaces | {"vision_embedded": avg(c[f"{part}hidden_size"], tokens)}, rows | made.rows, made.stacks)
