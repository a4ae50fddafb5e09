"""OLMo (the first)."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import LAYER, MLP, SIZES, attention
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding

# A gain on queries would move them across the limits.
CLIPPED = "queries are clipped"


@architecture(
    "olmo",
    **SIZES,
    kind="language",
    defaults={"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "clip_qkv": None},
)
def olmo(c: Config) -> Spec:
    """OLMo: Llama with LayerNorms that have no parameters and a fixed eps."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c["head_dim"] or width // heads
    turns = rotary(c, head_dim, still=CLIPPED if c["clip_qkv"] else "")
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        prefix="model.",
        shown=("final",) if c.headless else (),
        config={"head_dim": head_dim},
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "kv_heads": circ(c["num_key_value_heads"] or heads),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, turns),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": layer_norm("residual -> normed", eps=1e-5, affine=False),
            **attention(),
            f"{LAYER}.post_attention_layernorm": layer_norm("residual -> normed", eps=1e-5, affine=False),
            **MLP,
            "model.norm": layer_norm("residual -> final", eps=1e-5, affine=False),
            **language_model(tied),
        },
    )
