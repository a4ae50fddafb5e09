"""GPT-J."""

from lemonx.architectures.gpt2 import ALIASES
from lemonx.architectures.heads import language_model
from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import Rotary, avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

LAYER = "transformer.h.*"


@architecture(
    "gptj",
    width="n_embd",
    depth="n_layer",
    heads="n_head",
    ffn="n_inner",
    vocab="vocab_size",
    kind="language",
    aliases=ALIASES,
    defaults={"n_inner": None, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5, "rotary_dim": 64},
)
def gptj(c: Config) -> Spec:
    """GPT-J: one LayerNorm for attention and MLP side by side, the first neighbouring entries of a head turn."""
    width, head_dim = c["n_embd"], c["n_embd"] // c["n_head"]
    tied = c.tied("transformer.wte")
    turns = Rotary(c["rotary_dim"] or head_dim, adjacent=True)
    return Spec(
        stacks={"transformer.h": Stack(c["n_layer"], "residual")},
        eps="layer_norm_epsilon",
        prefix="transformer.",
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "heads": circ(c["n_head"]),
            **head(head_dim, turns),
            "hidden": circ(c["n_inner"] or 4 * width),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "transformer.wte": embedding("vocab -> residual"),
            f"{LAYER}.ln_1": layer_norm("residual -> normed"),
            f"{LAYER}.attn.q_proj": linear("normed -> (heads query)"),
            f"{LAYER}.attn.k_proj": linear("normed -> (heads key)"),
            f"{LAYER}.attn.v_proj": linear("normed -> (heads value)"),
            f"{LAYER}.attn.out_proj": linear("(heads value) -> residual"),
            **{f"{LAYER}.attn.{name}": dropped() for name in ("bias", "masked_bias")},
            f"{LAYER}.mlp.fc_in": linear("normed -> hidden"),
            f"{LAYER}.mlp.fc_out": linear("hidden -> residual"),
            "transformer.ln_f": layer_norm("residual -> final"),
            **language_model(tied),
        },
    )
