"""ModernBERT."""

from lemonx.architectures.bert import masked_lm
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

LAYER, FIRST = "model.layers.*", "model.layers.0"


@architecture(
    "modernbert",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    ffn="intermediate_size",
    vocab="vocab_size",
    kind="language",
    defaults={"norm_eps": 1e-5, "tie_word_embeddings": True},
)
def modernbert(c: Config) -> Spec:
    """ModernBERT: Pre-LN, rotary, gated MLP, local and global attention in turn."""
    width, heads, layers = c["hidden_size"], c["num_attention_heads"], c.count("num_hidden_layers")
    fused = "(heads query) + (heads key) + (heads value)"
    return Spec(
        # The first block has no norm before its attention: it reads what the norm of the embeddings wrote.
        stacks={"model.layers": Stack(layers, "residual", pinned=1, lists=("layer_types",), implied=True)},
        eps="norm_eps",
        prefix="model.",
        acts=("transform",),
        spaces={
            "embedded": avg(width),
            "residual": avg(width),
            **{name: zero(width) for name in ("normed", "final", "decoded")},
            "heads": circ(heads),
            **head(width // heads, rotary(c, width // heads)),
            "hidden": circ(c["intermediate_size"]),
            "transform": avg(width),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embeddings.tok_embeddings": embedding("vocab -> embedded"),
            "model.embeddings.norm": layer_norm("embedded -> residual"),
            f"{FIRST}.attn_norm": dropped(),
            f"{FIRST}.attn.Wqkv": linear(f"residual -> {fused}"),
            f"{LAYER}.attn_norm": layer_norm("residual -> normed"),
            f"{LAYER}.attn.Wqkv": linear(f"normed -> {fused}"),
            f"{LAYER}.attn.Wo": linear("(heads value) -> residual"),
            f"{LAYER}.mlp_norm": layer_norm("residual -> normed"),
            f"{LAYER}.mlp.Wi": linear("normed -> hidden + hidden", factor=1),
            f"{LAYER}.mlp.Wo": linear("hidden -> residual"),
            "model.final_norm": layer_norm("residual -> final"),
            "classifier": linear("decoded -> _", optional=True),
            **masked_lm(c, "final", "head.dense", "head.norm", "decoder", tied="model.embeddings.tok_embeddings"),
        },
    )
