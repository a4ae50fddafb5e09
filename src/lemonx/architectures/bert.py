"""BERT (Post-LN) and MegatronBert (the same with Pre-LN)."""

from lemonx.architectures.rotary import head
from lemonx.modules import Row, dropped, embedding, layer_norm, linear, parameter
from lemonx.spec import Config, Spec, Stack, architecture
from lemonx.vectors import avg, circ, fresh, zero

LAYER = "bert.encoder.layer.*"
SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "tie_word_embeddings": True, "type_vocab_size": 2}


@architecture("bert", **SIZES, free="language", defaults=DEFAULTS)
def bert(c: Config) -> Spec:
    """BERT: Post-LN, masked-LM and classification heads."""
    norm = layer_norm("residual -> residual")
    return _bert(c, final="residual", norms={
        "embedded": {"bert.embeddings.LayerNorm": norm},
        "attended": {f"{LAYER}.attention.output.LayerNorm": norm},
        "end": {f"{LAYER}.output.LayerNorm": norm},
    })  # fmt: skip


@architecture("megatron-bert", **SIZES, free="language", defaults=DEFAULTS)
def megatron_bert(c: Config) -> Spec:
    """MegatronBert: BERT with Pre-LN and a final LayerNorm."""
    norm = layer_norm("residual -> normed")
    return _bert(c, final="final", norms={
        "embedded": {f"{LAYER}.attention.ln": norm},
        "attended": {f"{LAYER}.ln": norm},
        "end": {"bert.encoder.ln": layer_norm("residual -> final")},
    })  # fmt: skip


def tied(c: Config, embedded: str) -> str | None:
    return embedded if c["tie_word_embeddings"] else None


def _bert(c: Config, final: str, norms: dict[str, dict[str, Row]]) -> Spec:
    """The table; `norms` stand where their key says: behind the embeddings, attention, or MLP."""
    width, heads, layer = c["hidden_size"], c["num_attention_heads"], LAYER
    normed = "residual" if final == "residual" else "normed"
    embedded = "bert.embeddings.word_embeddings"
    return Spec(
        stacks={"bert.encoder.layer": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_eps",
        prefix="bert.", acts=("transform",),
        spaces={
            "residual": avg(width),
            **{name: zero(width) for name in ("normed", "final")},
            "heads": circ(heads),
            **head(width // heads, {}),
            "hidden": circ(c["intermediate_size"], act=c["hidden_act"]),
            "pooled": circ(width),
            "transform": avg(width),
            "decoded": zero(width),
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["max_position_embeddings"]),
        },
        fixed={"types": c["type_vocab_size"]},
        rows={
            embedded: embedding("vocab -> residual"),
            "bert.embeddings.position_embeddings": embedding("positions -> residual"),
            "bert.embeddings.token_type_embeddings": embedding("types -> residual"),
            "bert.embeddings.position_ids": dropped(),
            **norms["embedded"],
            f"{layer}.attention.self.query": linear(f"{normed} -> (heads query)"),
            f"{layer}.attention.self.key": linear(f"{normed} -> (heads key)"),
            f"{layer}.attention.self.value": linear(f"{normed} -> (heads value)"),
            f"{layer}.attention.output.dense": linear("(heads value) -> residual"),
            **norms["attended"],
            f"{layer}.intermediate.dense": linear(f"{normed} -> hidden"),
            f"{layer}.output.dense": linear("hidden -> residual"),
            **norms["end"],
            "bert.pooler.dense": linear(f"{final} -> pooled", optional=True),
            "classifier": linear("pooled -> _", optional=True),
            "cls.seq_relationship": linear("pooled -> 2", optional=True),
            "cls.predictions.transform.dense": linear(f"{final} -> transform", optional=True),
            "cls.predictions.transform.LayerNorm": layer_norm("transform -> decoded", optional=True),
            "cls.predictions.decoder": linear("decoded -> vocab", optional=True, tied=tied(c, embedded)),
            "cls.predictions.bias": parameter("vocab", optional=True),
        },
    )  # fmt: skip
