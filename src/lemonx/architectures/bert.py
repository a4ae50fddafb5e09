"""BERT (Post-LN) and MegatronBert (the same with Pre-LN), and the table that other encoders share with them."""

from collections.abc import Mapping

from lemonx.architectures.memory import refuse_memory
from lemonx.architectures.rotary import head, head_width
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear, parameter

Rows = Mapping[str, Row]
SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
TYPED = SIZES | {"types": "type_vocab_size"}
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "tie_word_embeddings": True, "type_vocab_size": 2}


@architecture("bert", **TYPED, kind="language", defaults=DEFAULTS)
def bert(c: Config) -> Spec:
    """BERT: Post-LN, masked-LM and classification heads."""
    return encoder(c, "bert", _heads(c, "residual"), post_ln("bert"))


@architecture("megatron-bert", **TYPED, kind="language", defaults=DEFAULTS)
def megatron_bert(c: Config) -> Spec:
    """MegatronBert: BERT with Pre-LN and a final LayerNorm."""
    norm = layer_norm("residual -> normed")
    return encoder(c, "bert", _heads(c, "final"), {
        "embedded": {"bert.encoder.layer.*.attention.ln": norm},
        "attended": {"bert.encoder.layer.*.ln": norm},
        "end": {"bert.encoder.ln": layer_norm("residual -> final")},
    }, normed="normed")  # fmt: skip


def _heads(c: Config, final: str) -> dict[str, Row]:
    # A classifier of tokens reads them all, one of texts what the pooler made of the first.
    reads = final if c.is_a("ForTokenClassification") else "pooled"
    return {
        "bert.pooler.dense": linear(f"{final} -> pooled", optional=True),
        "classifier": linear(f"{reads} -> _", optional=True),
        "qa_outputs": linear(f"{final} -> _", optional=True),
        "cls.seq_relationship": linear("pooled -> 2", optional=True),
        **masked_lm(
            c,
            final,
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
            tied="bert.embeddings.word_embeddings",
        ),
        "cls.predictions.bias": parameter("vocab", optional=True),
    }


def masked_lm(
    c: Config, final: str, dense: str, norm: str, decoder: str, *, tied: str, eps: float | None = None
) -> dict[str, Row]:
    """The head of a masked LM: a layer with an activation, a LayerNorm, and a decoder that may be the embedding."""
    return {
        dense: linear(f"{final} -> transform", optional=True),
        norm: layer_norm("transform -> decoded", eps=eps, optional=True),
        decoder: linear("decoded -> vocab", tied=tied if c["tie_word_embeddings"] else None, optional=True),
    }


def post_ln(root: str) -> dict[str, Rows]:
    """The norms of a Post-LN encoder, under BERT's names, where they stand."""
    norm = layer_norm("residual -> residual")
    return {
        "embedded": {f"{root}.embeddings.LayerNorm": norm},
        "attended": {f"{root}.encoder.layer.*.attention.output.LayerNorm": norm},
        "end": {f"{root}.encoder.layer.*.output.LayerNorm": norm},
    }


def spaces(
    c: Config,
    width: str = "hidden_size",
    heads: str = "num_attention_heads",
    ffn: str = "intermediate_size",
    act: str = "hidden_act",
) -> dict[str, Space]:
    """The spaces of a Post-LN encoder with a masked-LM head; the arguments are what its config calls their sizes."""
    residual = c[width]
    return {
        "residual": avg(residual),
        "heads": circ(c[heads]),
        **head(head_width(c, width, heads)),
        "hidden": circ(c[ffn], act=c[act]),
        "pooled": circ(residual),
        "transform": avg(residual),
        "decoded": zero(residual),
        "vocab": fresh(c["vocab_size"]),
        "positions": fresh(c["max_position_embeddings"]),
    }


def encoder(
    c: Config, root: str, heads: Rows, norms: Mapping[str, Rows], normed: str = "residual", embedded: str = "residual"
) -> Spec:
    """BERT's table under the name `root`: blocks read `normed`, and embeddings write `embedded`.

    `norms` stand where their key says: behind the embeddings, attention, or MLP.
    """
    refuse_memory(c)
    width, layer, table = c["hidden_size"], f"{root}.encoder.layer.*", f"{root}.embeddings"
    return Spec(
        stacks={f"{root}.encoder.layer": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix=f"{root}.",
        acts=("transform",),
        spaces={
            **spaces(c),
            "types": fresh(c["type_vocab_size"]),
            **({} if normed == "residual" else {"normed": zero(width), "final": zero(width)}),
            **({} if embedded == "residual" else {"embedded": avg(width)}),
        },
        rows={
            f"{table}.word_embeddings": embedding(f"vocab -> {embedded}"),
            f"{table}.position_embeddings": embedding(f"positions -> {embedded}"),
            f"{table}.token_type_embeddings": embedding(f"types -> {embedded}"),
            **{f"{table}.{name}": dropped() for name in ("position_ids", "token_type_ids")},
            **norms["embedded"],
            f"{layer}.attention.self.query": linear(f"{normed} -> (heads query)"),
            f"{layer}.attention.self.key": linear(f"{normed} -> (heads key)"),
            f"{layer}.attention.self.value": linear(f"{normed} -> (heads value)"),
            f"{layer}.attention.output.dense": linear("(heads value) -> residual"),
            **norms["attended"],
            f"{layer}.intermediate.dense": linear(f"{normed} -> hidden"),
            f"{layer}.output.dense": linear("hidden -> residual"),
            **norms["end"],
            **heads,
        },
    )
