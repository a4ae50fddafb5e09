"""BLOOM."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.rotary import head
from lemonx.errors import Refused
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import alibi, avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear

LAYER = "transformer.h.*"


@architecture(
    "bloom",
    width="hidden_size",
    depth="n_layer",
    heads="n_head",
    vocab="vocab_size",
    kind="language",
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    defaults={
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
    },
)
def bloom(c: Config) -> Spec:
    """BLOOM: ALiBi, a LayerNorm on the embeddings."""
    if c["apply_residual_connection_post_layernorm"]:
        raise Refused(
            "apply_residual_connection_post_layernorm is true, which lemonx does not support",
            "expand a model where it is false",
        )
    width, heads = c["hidden_size"], c["n_head"]
    tied = c.tied("transformer.word_embeddings")
    return Spec(
        stacks={"transformer.h": Stack(c["n_layer"], "residual")},
        eps="layer_norm_epsilon",
        prefix="transformer.",
        spaces={
            "embedded": avg(width),
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "heads": alibi(heads),
            **head(width // heads),
            "hidden": circ(4 * width),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "transformer.word_embeddings": embedding("vocab -> embedded"),
            "transformer.word_embeddings_layernorm": layer_norm("embedded -> residual"),
            f"{LAYER}.input_layernorm": layer_norm("residual -> normed"),
            f"{LAYER}.self_attention.query_key_value": linear(
                "normed -> (heads query) + (heads key) + (heads value) by heads"
            ),
            f"{LAYER}.self_attention.dense": linear("(heads value) -> residual"),
            f"{LAYER}.post_attention_layernorm": layer_norm("residual -> normed"),
            f"{LAYER}.mlp.dense_h_to_4h": linear("normed -> hidden"),
            f"{LAYER}.mlp.dense_4h_to_h": linear("hidden -> residual"),
            "transformer.ln_f": layer_norm("residual -> final"),
            **language_model(tied),
        },
    )
