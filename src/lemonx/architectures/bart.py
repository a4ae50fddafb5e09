"""BART, and the blocks that other encoder-decoders share with it."""

from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, avg, circ, fresh, scaled
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear, parameter

SIZES = {
    "width": "d_model",
    "depth": ("encoder_layers", "decoder_layers"),
    "heads": ("encoder_attention_heads", "decoder_attention_heads"),
    "ffn": ("encoder_ffn_dim", "decoder_ffn_dim"),
    "vocab": "vocab_size",
}
DEFAULTS = {"scale_embedding": False, "tie_word_embeddings": True}
ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
EPS = 1e-5  # of every LayerNorm, in code
PARTS = ("encoder", "decoder")


@architecture("bart", **SIZES, positions="max_position_embeddings", kind="language", aliases=ALIASES,
              defaults=DEFAULTS)  # fmt: skip
def bart(c: Config) -> Spec:
    """BART: Post-LN encoder and decoder, every eps fixed, a LayerNorm on the embeddings."""
    width, parts = c["d_model"], parts_of(c)
    table = "model.shared" if parts == PARTS else "model.decoder.embed_tokens"
    tied = table if c["tie_word_embeddings"] else None
    generates = not c.is_a("BartModel", "ForSequenceClassification", "ForQuestionAnswering")
    repeated = {f"model.{part}.embed_tokens": embedding("vocab -> words", tied=tied, optional=True)
                for part in parts if parts == PARTS}  # fmt: skip
    return Spec(
        stacks={f"model.{part}.layers": Stack(c[f"{part}_layers"], "residual") for part in parts},
        prefix="model.",
        config=cached(c),
        spaces={
            "words": scaled(avg(width), "embedded", by=width**0.5 if c["scale_embedding"] else 1.0),
            "embedded": avg(width),
            "residual": avg(width),
            **({"final": avg(width)} if generates else {"pooled": circ(width)}),
            **{name: space for part in parts for name, space in units(c, part).items()},
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["max_position_embeddings"] + 2),
        },
        rows={
            table: embedding("vocab -> words"),
            **repeated,
            **{f"model.{part}.embed_positions": embedding("positions -> embedded") for part in parts},
            **{f"model.{part}.layernorm_embedding": layer_norm("embedded -> residual", eps=EPS) for part in parts},
            **stacked(parts),
            **(decoded("final", tied) if generates else _classified()),
        },
    )


def parts_of(c: Config) -> tuple[str, ...]:
    """An encoder and a decoder, or a decoder alone, which keeps what it asks an encoder by, and finds none."""
    return PARTS[1:] if c.is_a("ForCausalLM") else PARTS


def cached(c: Config) -> dict[str, int]:
    """A cache has as many layers as config.json says of the encoder, also where there is none."""
    layers = max(c.maybe("encoder_layers") or 0, c["decoder_layers"])
    return {} if parts_of(c) == PARTS else {"encoder_layers": layers}


def stacked(parts: tuple[str, ...]) -> dict[str, Row]:
    """The blocks of these parts, whose norms stand in the stream."""
    encoded, alone = {"decoder": "residual"}, parts != PARTS
    return {name: row for part in parts
            for name, row in blocks(part, "residual", "residual", encoded.get(part), alone=alone).items()}  # fmt: skip


def _classified() -> dict[str, Row]:
    return {
        "classification_head.dense": linear("residual -> pooled", optional=True),
        "classification_head.out_proj": linear("pooled -> _", optional=True),
        "qa_outputs": linear("residual -> _", optional=True),
    }


def decoded(final: str, tied: str | None, vocab: str = "vocab") -> dict[str, Row]:
    """What makes tokens of a Post-LN decoder's last norm, which is written as a tied decoder reads it."""
    return {
        "model.decoder.layers.-1.final_layer_norm": layer_norm(f"residual -> {final}", eps=EPS),
        "lm_head": linear(f"{final} -> {vocab}", tied=tied),
        "final_logits_bias": parameter(f"1 {vocab}", optional=True),
    }


def units(c: Config, part: str) -> dict[str, Space]:
    """Heads and neurons of an encoder's or decoder's blocks."""
    heads = c[f"{part}_attention_heads"]
    entries = {f"{part}_{name}": space for name, space in head(c["d_model"] // heads).items()}
    return {f"{part}_heads": circ(heads), **entries, f"{part}_hidden": circ(c[f"{part}_ffn_dim"])}


def blocks(part: str, stream: str, normed: str, encoded: str | None = None, *, alone: bool = False) -> dict[str, Row]:
    """The rows of one stack: what its modules read is `normed`, and `encoded` where a decoder asks the encoder, if it
    has one: `alone` it keeps what it would ask by, and does not run it.
    """
    layer, rows = f"model.{part}.layers.*", dict[str, Row]()
    heads = {name: f"({part}_heads {part}_{name})" for name in ("query", "key", "value")}
    for attention, memory in {"self_attn": normed, **({"encoder_attn": encoded} if encoded else {})}.items():
        rows |= {
            f"{layer}.{attention}.q_proj": linear(f"{normed} -> {heads['query']}"),
            f"{layer}.{attention}.k_proj": linear(f"{memory} -> {heads['key']}"),
            f"{layer}.{attention}.v_proj": linear(f"{memory} -> {heads['value']}"),
            f"{layer}.{attention}.out_proj": linear(f"{heads['value']} -> {stream}"),
            f"{layer}.{attention}_layer_norm": layer_norm(
                f"{stream} -> {normed}", eps=EPS, idle=alone and attention == "encoder_attn"
            ),
        }
    return rows | {
        f"{layer}.fc1": linear(f"{normed} -> {part}_hidden"),
        f"{layer}.fc2": linear(f"{part}_hidden -> {stream}"),
        f"{layer}.final_layer_norm": layer_norm(f"{stream} -> {normed}", eps=EPS),
    }
