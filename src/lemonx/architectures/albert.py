"""ALBERT."""

from lemonx.architectures.bert import DEFAULTS, TYPED, masked_lm
from lemonx.architectures.rotary import head, head_width
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear, parameter

GROUPS = "albert.encoder.albert_layer_groups"


@architecture("albert", **TYPED, embeddings="embedding_size", groups="num_hidden_groups", kind="language",
              defaults=DEFAULTS | {"hidden_act": "gelu_new", "embedding_size": 128, "num_hidden_groups": 1,
                                   "inner_group_num": 1})  # fmt: skip
def albert(c: Config) -> Spec:
    """ALBERT: BERT whose layers share their weights, with embeddings of another width."""
    width, word = c["hidden_size"], c["embedding_size"]
    layers, groups = c["num_hidden_layers"], c["num_hidden_groups"]
    blocks = [_block(f"{GROUPS}.*.albert_layers.{i}") for i in range(c.count("inner_group_num"))]
    return Spec(
        stacks={GROUPS: Stack(layers, "residual", sets=groups, sets_in="num_hidden_groups")},
        eps="layer_norm_eps",
        prefix="albert.",
        acts=("transform",),
        spaces={
            "embedded": avg(word),
            "projected": zero(word),
            "residual": avg(width),
            "heads": circ(c["num_attention_heads"]),
            **head(head_width(c)),
            "hidden": circ(c["intermediate_size"], act=c["hidden_act"]),
            "pooled": circ(width),
            "transform": avg(word),
            "decoded": zero(word),
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["max_position_embeddings"]),
            "types": fresh(c["type_vocab_size"]),
        },
        follows={"num_hidden_groups": "num_hidden_layers"} if groups == layers else {},
        rows={
            "albert.embeddings.word_embeddings": embedding("vocab -> embedded"),
            "albert.embeddings.position_embeddings": embedding("positions -> embedded"),
            "albert.embeddings.token_type_embeddings": embedding("types -> embedded"),
            **{f"albert.embeddings.{name}": dropped() for name in ("position_ids", "token_type_ids")},
            "albert.embeddings.LayerNorm": layer_norm("embedded -> projected"),
            "albert.encoder.embedding_hidden_mapping_in": linear("projected -> residual"),
            **{name: row for block in blocks for name, row in block.items()},
            **_heads(c),
        },
    )


def _block(layer: str) -> dict[str, Row]:
    return {
        f"{layer}.attention.query": linear("residual -> (heads query)"),
        f"{layer}.attention.key": linear("residual -> (heads key)"),
        f"{layer}.attention.value": linear("residual -> (heads value)"),
        f"{layer}.attention.dense": linear("(heads value) -> residual"),
        f"{layer}.attention.LayerNorm": layer_norm("residual -> residual"),
        f"{layer}.ffn": linear("residual -> hidden"),
        f"{layer}.ffn_output": linear("hidden -> residual"),
        f"{layer}.full_layer_layer_norm": layer_norm("residual -> residual"),
    }


def _heads(c: Config) -> dict[str, Row]:
    tied = "albert.embeddings.word_embeddings"
    return {
        "albert.pooler": linear("residual -> pooled", optional=True),
        "classifier": linear(f"{'residual' if c.is_a('ForTokenClassification') else 'pooled'} -> _", optional=True),
        "qa_outputs": linear("residual -> _", optional=True),
        "sop_classifier.classifier": linear("pooled -> _", optional=True),
        **masked_lm(c, "residual", "predictions.dense", "predictions.LayerNorm", "predictions.decoder", tied=tied),
        "predictions.bias": parameter("vocab", optional=True),
    }
