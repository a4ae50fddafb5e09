"""A table in a package of its own: what `lemonx infer` prints for an Arcee model, with names for its spaces."""

from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.spaces import circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear

LAYER = "model.layers.*"
TURNED = "a constant has a number of its own for every entry"


@architecture(
    "arcee",
    kind="language",
    defaults={"num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-05},
    head_dim="head_dim",
    width="hidden_size",
    ffn="intermediate_size",
    heads="num_attention_heads",
    depth="num_hidden_layers",
    kv_heads="num_key_value_heads",
)
def arcee(c: Config) -> Spec:
    """Arcee: a Llama whose MLP has no gate."""
    width = c["hidden_size"]
    return Spec(
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": rms_norm("residual -> normed", eps="rms_norm_eps"),
            f"{LAYER}.self_attn.q_proj": linear("normed -> (kv_heads group query)"),
            f"{LAYER}.self_attn.k_proj": linear("normed -> (kv_heads key)"),
            f"{LAYER}.self_attn.v_proj": linear("normed -> (kv_heads value)"),
            f"{LAYER}.self_attn.o_proj": linear("(kv_heads group value) -> residual"),
            f"{LAYER}.post_attention_layernorm": rms_norm("residual -> normed", eps="rms_norm_eps"),
            f"{LAYER}.mlp.up_proj": linear("normed -> hidden"),
            f"{LAYER}.mlp.down_proj": linear("hidden -> residual"),
            "model.norm": rms_norm("residual -> final", eps="rms_norm_eps"),
            "lm_head": linear("final -> logits"),
        },
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "final")},
            "vocab": fresh(c["vocab_size"]),
            "kv_heads": circ(c["num_key_value_heads"]),
            "group": circ(c["num_attention_heads"] // c["num_key_value_heads"]),
            "value": fresh(c["head_dim"]),
            "hidden": circ(c["intermediate_size"]),
        },
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        fixed={"query": c["head_dim"], "key": c["head_dim"], "logits": c["vocab_size"]},
        still={"query": TURNED, "key": TURNED, "logits": "it leaves the model"},
    )
