"""MPNet."""

from lemonx.architectures.bert import DEFAULTS, SIZES, spaces
from lemonx.architectures.roberta import heads
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

LAYER = "mpnet.encoder.layer.*"


@architecture("mpnet", **SIZES, kind="language",
              defaults={n: DEFAULTS[n] for n in ("hidden_act", "layer_norm_eps", "tie_word_embeddings")}
              | {"relative_attention_num_buckets": 32})  # fmt: skip
def mpnet(c: Config) -> Spec:
    """MPNet: RoBERTa without types of tokens, with a bias per head for every distance, the same in all blocks."""
    return Spec(
        stacks={"mpnet.encoder.layer": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix="mpnet.",
        acts=("transform",),
        spaces=spaces(c),
        fixed={"distances": c["relative_attention_num_buckets"]},
        rows={
            "mpnet.embeddings.word_embeddings": embedding("vocab -> residual"),
            "mpnet.embeddings.position_embeddings": embedding("positions -> residual"),
            "mpnet.embeddings.position_ids": dropped(),
            "mpnet.embeddings.LayerNorm": layer_norm("residual -> residual"),
            "mpnet.encoder.relative_attention_bias": embedding("distances -> heads"),
            f"{LAYER}.attention.attn.q": linear("residual -> (heads query)"),
            f"{LAYER}.attention.attn.k": linear("residual -> (heads key)"),
            f"{LAYER}.attention.attn.v": linear("residual -> (heads value)"),
            f"{LAYER}.attention.attn.o": linear("(heads value) -> residual"),
            f"{LAYER}.attention.LayerNorm": layer_norm("residual -> residual"),
            f"{LAYER}.intermediate.dense": linear("residual -> hidden"),
            f"{LAYER}.output.dense": linear("hidden -> residual"),
            f"{LAYER}.output.LayerNorm": layer_norm("residual -> residual"),
            **heads(c, "mpnet", "residual"),
        },
    )
