"""OLMoE."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import LAYER, SIZES
from lemonx.architectures.mixtral import moe
from lemonx.architectures.olmo import CLIPPED
from lemonx.architectures.olmo2 import attention, heads_normed_together
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.spaces import circ, experts, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding


@architecture(
    "olmoe",
    **{option: field for option, field in SIZES.items() if option != "head_dim"},
    experts=("num_experts", "num_experts_per_tok"),
    kind="language",
    aliases={"num_local_experts": "num_experts"},
    defaults={"num_key_value_heads": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "clip_qkv": None},
)
def olmoe(c: Config) -> Spec:
    """OLMoE: several MLPs, of which a router chooses; queries and keys normed over all heads."""
    width, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    head_dim = width // heads
    turns = rotary(c, head_dim, still=CLIPPED if c["clip_qkv"] else "")
    tied = c.tied("model.embed_tokens")
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="rms_norm_eps",
        prefix="model.",
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "final")},
            **heads_normed_together(heads, kv_heads or heads),
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
            **attention("normed", "residual"),
            f"{LAYER}.post_attention_layernorm": rms_norm("residual -> normed"),
            **moe(f"{LAYER}.mlp"),
            "model.norm": rms_norm("residual -> final"),
            **language_model(tied),
        },
    )
