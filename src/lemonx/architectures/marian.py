"""Marian (opus-mt)."""

from lemonx.architectures.bart import ALIASES, DEFAULTS, PARTS, SIZES, blocks, decoded, units
from lemonx.modules import embedding
from lemonx.spaces import avg, fresh, scaled
from lemonx.spec import Config, Spec, Stack, architecture

COMPUTED = "sinusoidal positions are computed from it, not stored"


@architecture("marian", **SIZES, target_vocab="decoder_vocab_size", kind="language", aliases=ALIASES,
              defaults=DEFAULTS | {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": None})  # fmt: skip
def marian(c: Config) -> Spec:
    """Marian: BART with sinusoidal positions, and no norm on the embeddings."""
    width, shared = c["d_model"], c["share_encoder_decoder_embeddings"]
    generates = not c.is_a("MarianModel")
    table, vocab = ("model.shared", "vocab") if shared else ("model.decoder.embed_tokens", "target_vocab")
    own = {
        "model.encoder.embed_tokens": embedding("vocab -> words", tied="model.shared" if shared else None),
        "model.decoder.embed_tokens": embedding(f"{vocab} -> words", tied="model.shared" if shared else None),
    }
    return Spec(
        stacks={f"model.{part}.layers": Stack(c[f"{part}_layers"], "residual") for part in PARTS},
        prefix="model.",
        spaces={
            "words": scaled(avg(width), "residual", by=width**0.5 if c["scale_embedding"] else 1.0),
            "residual": avg(width),
            **({"final": avg(width)} if generates else {}),
            **units(c, "encoder"),
            **units(c, "decoder"),
            "vocab": fresh(c["vocab_size"]),
            **({} if shared else {"target_vocab": fresh(c["decoder_vocab_size"] or c["vocab_size"])}),
        },
        fixed={"width": width},
        still={"width": COMPUTED},
        follows={"decoder_vocab_size": "vocab_size"} if shared else {},
        rows={
            **({"model.shared": embedding("vocab -> words")} if shared else {}),
            **own,
            # Some files have the positions all the same.
            **{f"model.{part}.embed_positions": embedding("_ -> residual", optional=True) for part in PARTS},
            **blocks("encoder", "residual", "residual"),
            **blocks("decoder", "residual", "residual", "residual"),
            **(decoded("final", table if c["tie_word_embeddings"] else None, vocab) if generates else {}),
        },
    )
