"""ViT and DeiT."""

from lemonx.architectures.heads import images
from lemonx.architectures.patches import count
from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, linear, parameter


@architecture(
    "vit",
    "deit",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    ffn="intermediate_size",
    pooled="pooler_output_size",
    kind="vision",
    defaults={"layer_norm_eps": 1e-12, "pooler_output_size": None, "num_channels": 3},
)
def vit(c: Config) -> Spec:
    """ViT, DeiT: Pre-LN, class token (and distillation token), learned positions."""
    name, width, heads = c["model_type"], c["hidden_size"], c["num_attention_heads"]
    tokens = count(c) + (2 if name == "deit" else 1)
    return Spec(
        stacks={f"{name}.encoder.layer": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix=f"{name}.",
        spaces={
            "residual": avg(width, tokens),
            "normed": zero(width, tokens),
            "final": zero(width, tokens),
            "heads": circ(heads, tokens),
            **head(width // heads, positions=tokens),
            "hidden": circ(c["intermediate_size"], tokens),
            "pooled": circ(c["pooler_output_size"] or width),
        },
        fixed={"channels": c["num_channels"]},
        rows={
            f"{name}.embeddings.cls_token": parameter("1 1 residual"),
            f"{name}.embeddings.distillation_token": parameter("1 1 residual", optional=name == "vit"),
            f"{name}.embeddings.mask_token": parameter("1 1 residual", optional=True),
            f"{name}.embeddings.position_embeddings": parameter("1 _ residual"),
            f"{name}.embeddings.patch_embeddings.projection": conv("channels -> residual"),
            **block(f"{name}.encoder.layer.*"),
            f"{name}.layernorm": layer_norm("residual -> final"),
            f"{name}.pooler.dense": linear("final -> pooled", optional=True),
            **images(),
            "cls_classifier": linear("final -> _", optional=True),
            "distillation_classifier": linear("final -> _", optional=True),
        },
    )


def block(layer: str, attended: str = "residual", computed: str = "residual") -> dict[str, Row]:
    """The rows of a Pre-LN block; `attended` and `computed` are what attention and the MLP write."""
    return {
        f"{layer}.layernorm_before": layer_norm("residual -> normed"),
        f"{layer}.attention.attention.query": linear("normed -> (heads query)"),
        f"{layer}.attention.attention.key": linear("normed -> (heads key)"),
        f"{layer}.attention.attention.value": linear("normed -> (heads value)"),
        f"{layer}.attention.output.dense": linear(f"(heads value) -> {attended}"),
        f"{layer}.layernorm_after": layer_norm("residual -> normed"),
        f"{layer}.intermediate.dense": linear("normed -> hidden"),
        f"{layer}.output.dense": linear(f"hidden -> {computed}"),
    }
