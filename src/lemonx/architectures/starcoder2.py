"""StarCoder 2."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import LAYER, SIZES, attention
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear


@architecture(
    "starcoder2",
    **SIZES,
    kind="language",
    defaults={"num_key_value_heads": 2, "head_dim": None, "tie_word_embeddings": True, "norm_epsilon": 1e-5},
)
def starcoder2(c: Config) -> Spec:
    """StarCoder 2: LayerNorm, grouped-query attention, a plain MLP, biases."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c["head_dim"] or width // heads
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual", lists=("layer_types",))},
        eps="norm_epsilon",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "kv_heads": circ(c["num_key_value_heads"]),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, rotary(c, head_dim)),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": layer_norm("residual -> normed"),
            **attention(),
            f"{LAYER}.post_attention_layernorm": layer_norm("residual -> normed"),
            f"{LAYER}.mlp.c_fc": linear("normed -> hidden"),
            f"{LAYER}.mlp.c_proj": linear("hidden -> residual"),
            "model.norm": layer_norm("residual -> final"),
            **language_model(tied),
        },
    )
