"""The paper's Pre-LN BERT (lemonx.models.pre_ln_bert)."""

from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear


@architecture(
    "pre-ln-bert",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    ffn="intermediate_size",
    vocab="vocab_size",
    positions="max_position_embeddings",
    types="type_vocab_size",
    kind="language",
    defaults={"layer_norm_eps": 1e-12, "tie_word_embeddings": True, "type_vocab_size": 2},
)
def pre_ln_bert(c: Config) -> Spec:
    """Pre-LN BERT: the paper's, with a masked-LM head of one layer."""
    width, heads, layer = c["hidden_size"], c["num_attention_heads"], "bert.layers.*"
    embedded = "bert.embeddings.word_embeddings"
    tied = embedded if c["tie_word_embeddings"] and not c.headless else None
    return Spec(
        stacks={"bert.layers": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix="bert.",
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "heads": circ(heads),
            **head(width // heads),
            "hidden": circ(c["intermediate_size"]),
            "pooled": circ(width),
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["max_position_embeddings"]),
            "types": fresh(c["type_vocab_size"]),
        },
        rows={
            embedded: embedding("vocab -> residual"),
            "bert.embeddings.position_embeddings": embedding("positions -> residual"),
            "bert.embeddings.token_type_embeddings": embedding("types -> residual"),
            f"{layer}.attention_norm": layer_norm("residual -> normed"),
            f"{layer}.attention.query": linear("normed -> (heads query)"),
            f"{layer}.attention.key": linear("normed -> (heads key)"),
            f"{layer}.attention.value": linear("normed -> (heads value)"),
            f"{layer}.attention.output": linear("(heads value) -> residual"),
            f"{layer}.mlp_norm": layer_norm("residual -> normed"),
            f"{layer}.mlp.intermediate": linear("normed -> hidden"),
            f"{layer}.mlp.output": linear("hidden -> residual"),
            "bert.final_norm": layer_norm("residual -> final"),
            "lm_head": linear("final -> vocab", tied=tied, optional=True),
            "pooler": linear("final -> pooled", optional=True),
            "classifier": linear("pooled -> _", optional=True),
        },
    )  # fmt: skip
