"""StableLM."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import LAYER, MLP, attention
from lemonx.architectures.rotary import PARTIAL, head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding

DEFAULTS = {"num_key_value_heads": 32, "tie_word_embeddings": False, "layer_norm_eps": 1e-5,
            "qk_layernorm": False, "use_parallel_residual": False}  # fmt: skip


@architecture(
    "stablelm",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    ffn="intermediate_size",
    vocab="vocab_size",
    kind="language",
    defaults=DEFAULTS,
)
def stablelm(c: Config) -> Spec:
    """StableLM: LayerNorm, gated MLP, part of a head turns, a norm of its own for every head."""
    width, heads, normed = c["hidden_size"], c["num_attention_heads"], c["qk_layernorm"]
    raw = "raw_" if normed else ""
    norms = {
        f"{LAYER}.self_attn.q_layernorm.norms.{{heads}}": layer_norm("raw_query -> query"),
        f"{LAYER}.self_attn.k_layernorm.norms.{{kv_heads}}": layer_norm("raw_key -> key"),
    }
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix="model.",
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "kv_heads": circ(c["num_key_value_heads"]),
            "heads": grouped(heads, under="kv_heads"),
            **head(width // heads, rotary(c, width // heads, c.maybe(PARTIAL) or 0.25), normed=normed, centred=True),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": layer_norm("residual -> normed"),
            **attention(raw),
            **(norms if normed else {}),
            f"{LAYER}.self_attn.rotary_emb.inv_freq": dropped(),
            f"{LAYER}.post_attention_layernorm": layer_norm("residual -> normed", optional=c["use_parallel_residual"]),
            **MLP,
            "model.norm": layer_norm("residual -> final"),
            **language_model(tied),
        },
    )
