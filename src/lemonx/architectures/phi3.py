"""Phi-3."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import DEFAULTS, LAYER, SIZES
from lemonx.architectures.rotary import PARTIAL, head, rotary
from lemonx.errors import BadTarget
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.spaces import circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear


def _check_factors(c: Config, head_dim: int) -> None:
    """BadTarget if there are not as many factors of longrope as its config class asks for, which knows no head_dim."""
    rope = c.maybe("rope_scaling") or c.maybe("rope_parameters") or {}
    turning = int(head_dim * (rope.get(PARTIAL) or c.maybe(PARTIAL) or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if (factors := rope.get(name)) is not None and len(factors) != turning:
            raise BadTarget(
                f"rope_scaling has {len(factors)} numbers in {name}, and transformers asks for {turning} where "
                f"hidden_size / heads is {head_dim}",
                "grow --width and --heads by the same factor",
            )


@architecture("phi3", **SIZES, kind="language", defaults=DEFAULTS | {"rms_norm_eps": 1e-5})
def phi3(c: Config) -> Spec:
    """Phi-3: Llama with query, key and value in one weight, and both halves of the gated MLP in another."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c["head_dim"] or width // heads
    tied = c.tied("model.embed_tokens")
    _check_factors(c, width // heads)
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="rms_norm_eps",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "final")},
            "kv_heads": circ(c["num_key_value_heads"] or heads),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, rotary(c, head_dim, c.maybe(PARTIAL) or 1.0)),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": rms_norm("residual -> normed"),
            f"{LAYER}.self_attn.qkv_proj": linear("normed -> (heads query) + (kv_heads key) + (kv_heads value)"),
            f"{LAYER}.self_attn.o_proj": linear("(heads value) -> residual"),
            f"{LAYER}.post_attention_layernorm": rms_norm("residual -> normed"),
            f"{LAYER}.mlp.gate_up_proj": linear("normed -> hidden + hidden", factor=1),
            f"{LAYER}.mlp.down_proj": linear("hidden -> residual"),
            "model.norm": rms_norm("residual -> final"),
            **language_model(tied),
        },
    )
