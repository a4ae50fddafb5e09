"""OLMo 2."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import DEFAULTS, LAYER, SIZES
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, circ, fresh, grouped, iso, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear


@architecture("olmo2", **SIZES, kind="language", defaults=DEFAULTS | {"rms_norm_eps": 1e-5})
def olmo2(c: Config) -> Spec:
    """OLMo 2: Res-Post-Norm with RMSNorm, queries and keys normed over all heads."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c["head_dim"] or width // heads
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="rms_norm_eps",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            **{name: zero(width) for name in ("residual", "branch", "final")},
            **heads_normed_together(heads, c["num_key_value_heads"] or heads),
            **head(head_dim, rotary(c, head_dim), normed=True),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        acts=("kv_heads", "heads"),
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            **attention("residual", "branch"),
            f"{LAYER}.self_attn.rotary_emb.inv_freq": dropped(),
            f"{LAYER}.post_attention_layernorm": rms_norm("branch -> residual"),
            f"{LAYER}.mlp.gate_proj": linear("residual -> hidden"),
            f"{LAYER}.mlp.up_proj": linear("residual -> hidden"),
            f"{LAYER}.mlp.down_proj": linear("hidden -> branch"),
            f"{LAYER}.post_feedforward_layernorm": rms_norm("branch -> residual"),
            "model.norm": rms_norm("residual -> final"),
            **language_model(tied),
        },
    )


def heads_normed_together(heads: int, kv_heads: int) -> dict[str, Space]:
    """Queries and keys before a norm over all of them, whose copies share an energy, and the heads behind it."""
    return {
        "keys": iso(kv_heads),
        "queries": grouped(heads, under="keys", kind="iso"),
        "kv_heads": circ(kv_heads),
        "heads": grouped(heads, under="kv_heads"),
    }


def attention(reads: str, writes: str) -> dict[str, Row]:
    """Grouped-query attention with a norm over all queries, and one over all keys."""
    here = f"{LAYER}.self_attn"
    return {
        f"{here}.q_proj": linear(f"{reads} -> (queries raw_query)"),
        f"{here}.k_proj": linear(f"{reads} -> (keys raw_key)"),
        f"{here}.v_proj": linear(f"{reads} -> (kv_heads value)"),
        f"{here}.q_norm": rms_norm("(queries raw_query) -> (heads query)"),
        f"{here}.k_norm": rms_norm("(keys raw_key) -> (kv_heads key)"),
        f"{here}.o_proj": linear(f"(heads value) -> {writes}"),
    }
