"""Cohere Command R, R+ and R7B."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import LAYER, MLP, SIZES, attention
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding

DEFAULTS = {"num_key_value_heads": None, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}
COUPLED = {option: field for option, field in SIZES.items() if option != "head_dim"}


@architecture("cohere", **SIZES, kind="language", defaults=DEFAULTS | {"head_dim": None, "use_qk_norm": False})
def cohere(c: Config) -> Spec:
    """Cohere: LayerNorm without bias, attention and gated MLP side by side, neighbouring entries turn."""
    return _cohere(c, c["head_dim"] or c["hidden_size"] // c["num_attention_heads"], c["use_qk_norm"])


@architecture("cohere2", **COUPLED, kind="language", defaults=DEFAULTS)
def cohere2(c: Config) -> Spec:
    """Cohere 2: Cohere with layers of several types."""
    return _cohere(c, c["hidden_size"] // c["num_attention_heads"], False)


def _cohere(c: Config, head_dim: int, normed: bool) -> Spec:
    width, heads, raw = c["hidden_size"], c["num_attention_heads"], "raw_" if normed else ""
    norms = {
        f"{LAYER}.self_attn.q_norm": layer_norm("raw_query -> query", each="heads"),
        f"{LAYER}.self_attn.k_norm": layer_norm("raw_key -> key", each="kv_heads"),
    }
    tied, windows = c.tied("model.embed_tokens"), c["model_type"] == "cohere2"
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual", lists=("layer_types",), implied=windows)},
        eps="layer_norm_eps",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "kv_heads": circ(c["num_key_value_heads"] or heads),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, rotary(c, head_dim, adjacent=True), normed=normed, centred=True),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": layer_norm("residual -> normed"),
            **attention(raw),
            **(norms if normed else {}),
            **MLP,
            "model.norm": layer_norm("residual -> final"),
            **language_model(tied),
        },
    )
