"""OLMoE."""

from lemonx.architectures.llama import LAYER, SIZES
from lemonx.architectures.mixtral import moe
from lemonx.architectures.olmo import CLIPPED
from lemonx.architectures.rotary import head, rotary
from lemonx.modules import embedding, linear, rms_norm
from lemonx.spec import Config, Spec, Stack, architecture
from lemonx.vectors import circ, experts, fresh, grouped, iso, zero


@architecture(
    "olmoe",
    **{option: field for option, field in SIZES.items() if option != "head_dim"},
    experts=("num_experts", "num_experts_per_tok"),
    free="language",
    defaults={"num_key_value_heads": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "clip_qkv": None},
)
def olmoe(c: Config) -> Spec:
    """OLMoE: several MLPs, of which a router chooses; queries and keys normed over all heads."""
    width, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    head_dim = width // heads
    turns = rotary(c, head_dim) | (CLIPPED if c["clip_qkv"] else {})
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="rms_norm_eps",
        prefix="model.",
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "final")},
            "keys": iso(kv_heads or heads),
            "queries": grouped(heads, under="keys", kind="iso"),
            "kv_heads": circ(kv_heads or heads),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, turns, normed=True),
            "experts": experts(
                c["num_experts"], c["num_experts_per_tok"], renormalised=bool(c.maybe("norm_topk_prob"))
            ),
            "hidden": circ(c["intermediate_size"], within="experts"),
            "vocab": fresh(c["vocab_size"]),
        },
        acts=("kv_heads", "heads"),
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": rms_norm("residual -> normed"),
            f"{LAYER}.self_attn.q_proj": linear("normed -> (queries raw_query)"),
            f"{LAYER}.self_attn.k_proj": linear("normed -> (keys raw_key)"),
            f"{LAYER}.self_attn.v_proj": linear("normed -> (kv_heads value)"),
            f"{LAYER}.self_attn.q_norm": rms_norm("(queries raw_query) -> (heads query)"),
            f"{LAYER}.self_attn.k_norm": rms_norm("(keys raw_key) -> (kv_heads key)"),
            f"{LAYER}.self_attn.o_proj": linear("(heads value) -> residual"),
            f"{LAYER}.post_attention_layernorm": rms_norm("residual -> normed"),
            **moe(f"{LAYER}.mlp"),
            "model.norm": rms_norm("residual -> final"),
            "lm_head": linear("final -> vocab", tied=tied, optional=True),
        },
    )
