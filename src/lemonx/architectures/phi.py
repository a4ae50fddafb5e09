"""Phi-1, Phi-1.5, Phi-2."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import DEFAULTS, LAYER, SIZES, attention
from lemonx.architectures.rotary import PARTIAL, head, rotary
from lemonx.errors import BadSizes
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear

OWN = {"layer_norm_eps": 1e-5, "qk_layernorm": False}


@architecture(
    "phi", **SIZES, kind="language", defaults={k: v for k, v in DEFAULTS.items() if k != "rms_norm_eps"} | OWN
)
def phi(c: Config) -> Spec:
    """Phi: one LayerNorm for attention and MLP side by side, part of a head turns."""
    width, heads, normed = c["hidden_size"], c["num_attention_heads"], c["qk_layernorm"]
    head_dim, raw = c["head_dim"] or width // heads, "raw_" if normed else ""
    if normed and head_dim * heads != width:
        found = f"a Phi with qk_layernorm has heads of {width} / {heads} entries, not {head_dim}"
        raise BadSizes(found, "choose another --width or --heads")
    norms = {
        f"{LAYER}.self_attn.q_layernorm": layer_norm("raw_query -> query"),
        f"{LAYER}.self_attn.k_layernorm": layer_norm("raw_key -> key"),
    }
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "kv_heads": circ(c["num_key_value_heads"] or heads),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, rotary(c, head_dim, c.maybe(PARTIAL) or 0.5), normed=normed, centred=True),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": layer_norm("residual -> normed"),
            **attention(raw, out="dense"),
            **(norms if normed else {}),
            f"{LAYER}.mlp.fc1": linear("normed -> hidden"),
            f"{LAYER}.mlp.fc2": linear("hidden -> residual"),
            "model.final_layernorm": layer_norm("residual -> final"),
            **language_model(tied),
        },
    )
