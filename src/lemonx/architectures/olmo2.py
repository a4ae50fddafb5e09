"""OLMo 2."""

from lemonx.architectures.rotary import head, rotary
from lemonx.modules import dropped, embedding, linear, rms_norm
from lemonx.spec import Config, Spec, Stack, architecture
from lemonx.vectors import circ, fresh, grouped, iso, zero


@architecture(
    "olmo2",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    ffn="intermediate_size",
    head_dim="head_dim",
    vocab="vocab_size",
    free="language",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    },
)
def olmo2(c: Config) -> Spec:
    """OLMo 2: Res-Post-Norm with RMSNorm, queries and keys normed over all heads."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim, layer = c["head_dim"] or width // heads, "model.layers.*"
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="rms_norm_eps",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            "residual": zero(width),
            "branch": zero(width),
            "final": zero(width),
            "keys": iso(c["num_key_value_heads"] or heads),
            "queries": grouped(heads, under="keys", kind="iso"),
            "kv_heads": circ(c["num_key_value_heads"] or heads),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, rotary(c, head_dim), normed=True),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        acts=("kv_heads", "heads"),
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{layer}.self_attn.q_proj": linear("residual -> (queries raw_query)"),
            f"{layer}.self_attn.k_proj": linear("residual -> (keys raw_key)"),
            f"{layer}.self_attn.v_proj": linear("residual -> (kv_heads value)"),
            f"{layer}.self_attn.q_norm": rms_norm("(queries raw_query) -> (heads query)"),
            f"{layer}.self_attn.k_norm": rms_norm("(keys raw_key) -> (kv_heads key)"),
            f"{layer}.self_attn.o_proj": linear("(heads value) -> branch"),
            f"{layer}.self_attn.rotary_emb.inv_freq": dropped(),
            f"{layer}.post_attention_layernorm": rms_norm("branch -> residual"),
            f"{layer}.mlp.gate_proj": linear("residual -> hidden"),
            f"{layer}.mlp.up_proj": linear("residual -> hidden"),
            f"{layer}.mlp.down_proj": linear("hidden -> branch"),
            f"{layer}.post_feedforward_layernorm": rms_norm("branch -> residual"),
            "model.norm": rms_norm("residual -> final"),
            "lm_head": linear("final -> vocab", tied=tied, optional=True),
            "score": linear("final -> _", optional=True),
        },
    )
