"""T5, T5 v1.1 (and Flan-T5), mT5."""

from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

SIZES = {
    "width": "d_model",
    "depth": ("num_layers", "num_decoder_layers"),
    "heads": "num_heads",
    "ffn": "d_ff",
    "head_dim": "d_kv",
    "vocab": "vocab_size",
}
DEFAULTS = {"d_kv": 64, "num_decoder_layers": None, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": True,
            "relative_attention_num_buckets": 32}  # fmt: skip
ALIASES = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
           "head_dim": "d_kv"}  # fmt: skip


@architecture("t5", **SIZES, kind="language", aliases=ALIASES, defaults=DEFAULTS | {"feed_forward_proj": "relu"})
def t5(c: Config) -> Spec:
    """T5, T5 v1.1, Flan-T5: encoder and decoder with RMSNorm and a bias per head for every distance."""
    # transformers asks one field whether outputs are scaled, and ties whatever the file does not have twice.
    scaled = c.maybe("scale_decoder_outputs")
    return _t5(c, scaled=c["tie_word_embeddings"] is not False if scaled is None else scaled)


@architecture("mt5", **SIZES, kind="language", aliases=ALIASES, defaults=DEFAULTS | {"feed_forward_proj": "gated-gelu"})
def mt5(c: Config) -> Spec:
    """mT5: T5 v1.1 for many languages."""
    return _t5(c, scaled=False)


def _t5(c: Config, scaled: bool) -> Spec:
    width, decoder = c["d_model"], c["num_decoder_layers"] or c["num_layers"]
    depths = {"encoder": c["num_layers"], "decoder": decoder}
    if c.is_a("EncoderModel", "ForTokenClassification"):
        del depths["decoder"]
    generates = not c.is_a("T5Model", "EncoderModel", "Classification", "ForQuestionAnswering")
    by = width**-0.5 if generates and scaled else 1.0
    return Spec(
        stacks={f"transformer.{part}.block": Stack(depth, "residual") for part, depth in depths.items()},
        eps="layer_norm_epsilon",
        prefix="transformer.",
        config={"num_decoder_layers": decoder},
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "encoded")},
            **({"final": zero(width, scale=by), "pooled": circ(width)} if "decoder" in depths else {}),
            "heads": circ(c["num_heads"]),
            **head(c["d_kv"], scale=1.0),
            "hidden": circ(c["d_ff"]),
            "vocab": fresh(c["vocab_size"]),
        },
        fixed={"distances": c["relative_attention_num_buckets"]},
        rows={
            "transformer.shared": embedding("vocab -> residual"),
            **{name: row for part in depths for name, row in _stack(c, f"transformer.{part}").items()},
            "transformer.encoder.final_layer_norm": rms_norm("residual -> encoded"),
            "classifier": linear("encoded -> _", optional=True),
            **(_decoded(generates, scaled) if "decoder" in depths else {}),
        },
    )


def _decoded(generates: bool, scaled: bool) -> dict[str, Row]:
    tied = "transformer.shared"
    head = {"lm_head": linear("final -> vocab", tied=tied, own=not scaled)} if generates else {}
    return {
        "transformer.decoder.final_layer_norm": rms_norm("residual -> final"),
        **head,
        "classification_head.dense": linear("final -> pooled", optional=True),
        "classification_head.out_proj": linear("pooled -> _", optional=True),
        "qa_outputs": linear("final -> _", optional=True),
    }


def _stack(c: Config, part: str) -> dict[str, Row]:
    """The rows of one stack. The table of distances is in its first block and serves all of them."""
    layer, first, crosses = f"{part}.block.*.layer", f"{part}.block.0.layer", part.endswith("decoder")
    memory = {"0.SelfAttention": "normed", **({"1.EncDecAttention": "encoded"} if crosses else {})}
    mlp = f"{layer}.{len(memory)}"
    rows: dict[str, Row] = {
        f"{part}.embed_tokens": embedding("vocab -> residual", tied="transformer.shared"),
        f"{first}.0.SelfAttention.relative_attention_bias": embedding("distances -> heads"),
        f"{first}.1.EncDecAttention.relative_attention_bias.weight": dropped(),
    }
    for i, (name, reads) in enumerate(memory.items()):
        rows |= {
            f"{layer}.{i}.layer_norm": rms_norm("residual -> normed"),
            f"{layer}.{name}.q": linear("normed -> (heads query)"),
            f"{layer}.{name}.k": linear(f"{reads} -> (heads key)"),
            f"{layer}.{name}.v": linear(f"{reads} -> (heads value)"),
            f"{layer}.{name}.o": linear("(heads value) -> residual"),
        }
    gates = ("wi_0", "wi_1") if c["feed_forward_proj"].startswith("gated") else ("wi",)
    return rows | {
        f"{mlp}.layer_norm": rms_norm("residual -> normed"),
        **{
            f"{mlp}.DenseReluDense.{name}": linear("normed -> hidden", factor=0 if name == "wi_1" else None)
            for name in gates
        },
        f"{mlp}.DenseReluDense.wo": linear("hidden -> residual"),
    }
