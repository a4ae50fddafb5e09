"""Llama, Mistral, Qwen2."""

from lemonx.errors import BadTarget
from lemonx.modules import dropped, embedding, linear, rms_norm
from lemonx.spec import Config, Spec, Stack, architecture
from lemonx.vectors import circ, grouped, zero

SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
}
DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}


@architecture("llama", **SIZES, free="language", defaults=DEFAULTS)
@architecture("mistral", **SIZES, free="language", defaults=DEFAULTS | {"num_key_value_heads": 8})
@architecture("qwen2", **SIZES, free="language", defaults=DEFAULTS | {"num_key_value_heads": 32})
def llama(c: Config) -> Spec:
    """Llama, Mistral, Qwen2: RMSNorm, grouped-query attention, gated MLP."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if c["model_type"] == "llama" and width % heads:
        raise BadTarget(
            f"a Llama's hidden_size {width} must be a multiple of its {heads} heads: transformers refuses it"
        )
    head_dim = c["head_dim"] or width // heads
    layer = "model.layers.*"
    tied = "model.embed_tokens" if c["tie_word_embeddings"] and not c.headless else None
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual", lists=("layer_types",))},
        eps="rms_norm_eps",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            "residual": zero(width),
            "normed": zero(width),
            "final": zero(width),
            "kv_heads": circ(c["num_key_value_heads"] or heads),
            "heads": grouped(heads, under="kv_heads"),
            "hidden": circ(c["intermediate_size"]),
        },
        fixed={"vocab": c["vocab_size"], "head_dim": head_dim},
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{layer}.input_layernorm": rms_norm("residual -> normed"),
            f"{layer}.self_attn.q_proj": linear("normed -> (heads head_dim)"),
            f"{layer}.self_attn.k_proj": linear("normed -> (kv_heads head_dim)"),
            f"{layer}.self_attn.v_proj": linear("normed -> (kv_heads head_dim)"),
            f"{layer}.self_attn.o_proj": linear("(heads head_dim) -> residual"),
            f"{layer}.self_attn.rotary_emb.inv_freq": dropped(),
            f"{layer}.post_attention_layernorm": rms_norm("residual -> normed"),
            f"{layer}.mlp.gate_proj": linear("normed -> hidden"),
            f"{layer}.mlp.up_proj": linear("normed -> hidden"),
            f"{layer}.mlp.down_proj": linear("hidden -> residual"),
            "model.norm": rms_norm("residual -> final"),
            "lm_head": linear("final -> vocab", tied=tied, optional=True),
            "score": linear("final -> _", optional=True),
        },
    )
