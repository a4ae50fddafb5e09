"""GPT-NeoX, Pythia."""

from lemonx.architectures.heads import classifiers
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

LAYER = "gpt_neox.layers.*"


@architecture(
    "gpt_neox",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    ffn="intermediate_size",
    vocab="vocab_size",
    kind="language",
    defaults={"tie_word_embeddings": False, "layer_norm_eps": 1e-5},
)
def gpt_neox(c: Config) -> Spec:
    """GPT-NeoX, Pythia: attention and MLP side by side, query, key and value of a head in turn."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    part = c.maybe("rotary_pct") or 0.25
    tied = c.tied("gpt_neox.embed_in")
    return Spec(
        stacks={"gpt_neox.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix="gpt_neox.",
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "heads": circ(heads),
            **head(width // heads, rotary(c, width // heads, part)),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "gpt_neox.embed_in": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": layer_norm("residual -> normed"),
            f"{LAYER}.post_attention_layernorm": layer_norm("residual -> normed"),
            f"{LAYER}.attention.query_key_value": linear(
                "normed -> (heads query) + (heads key) + (heads value) by heads"
            ),
            f"{LAYER}.attention.dense": linear("(heads value) -> residual"),
            **{f"{LAYER}.attention.{name}": dropped() for name in ("bias", "masked_bias", "rotary_emb.inv_freq")},
            f"{LAYER}.mlp.dense_h_to_4h": linear("normed -> hidden"),
            f"{LAYER}.mlp.dense_4h_to_h": linear("hidden -> residual"),
            "gpt_neox.final_layer_norm": layer_norm("residual -> final"),
            "embed_out": linear("final -> vocab", tied=tied, optional=True),
            **classifiers(),
        },
    )
