"""DistilBERT."""

from lemonx.architectures.bert import masked_lm, spaces
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

LAYER = "distilbert.transformer.layer.*"
EPS = 1e-12  # of every LayerNorm, in code


@architecture(
    "distilbert",
    width="dim",
    depth="n_layers",
    heads="n_heads",
    ffn="hidden_dim",
    vocab="vocab_size",
    positions="max_position_embeddings",
    kind="language",
    aliases={"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    defaults={"tie_word_embeddings": True, "activation": "gelu"},
)
def distilbert(c: Config) -> Spec:
    """DistilBERT: BERT without types of tokens, every eps fixed."""
    embedded = "distilbert.embeddings.word_embeddings"
    tokens = c.is_a("ForTokenClassification")
    names = "vocab_transform", "vocab_layer_norm", "vocab_projector"
    return Spec(
        stacks={"distilbert.transformer.layer": Stack(c["n_layers"], "residual")},
        prefix="distilbert.",
        acts=("transform",),
        spaces=spaces(c, "dim", "n_heads", "hidden_dim", "activation"),
        rows={
            embedded: embedding("vocab -> residual"),
            "distilbert.embeddings.position_embeddings": embedding("positions -> residual"),
            "distilbert.embeddings.position_ids": dropped(),
            "distilbert.embeddings.LayerNorm": layer_norm("residual -> residual", eps=EPS),
            f"{LAYER}.attention.q_lin": linear("residual -> (heads query)"),
            f"{LAYER}.attention.k_lin": linear("residual -> (heads key)"),
            f"{LAYER}.attention.v_lin": linear("residual -> (heads value)"),
            f"{LAYER}.attention.out_lin": linear("(heads value) -> residual"),
            f"{LAYER}.sa_layer_norm": layer_norm("residual -> residual", eps=EPS),
            f"{LAYER}.ffn.lin1": linear("residual -> hidden"),
            f"{LAYER}.ffn.lin2": linear("hidden -> residual"),
            f"{LAYER}.output_layer_norm": layer_norm("residual -> residual", eps=EPS),
            "pre_classifier": linear("residual -> pooled", optional=True),
            "classifier": linear(f"{'residual' if tokens else 'pooled'} -> _", optional=True),
            "qa_outputs": linear("residual -> _", optional=True),
            **masked_lm(c, "residual", *names, tied=embedded, eps=EPS),
        },
    )
