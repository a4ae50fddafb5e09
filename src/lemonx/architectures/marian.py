"""Marian (opus-mt)."""

from lemonx.architectures.bart import ALIASES, DEFAULTS, PARTS, SIZES, cached, decoded, parts_of, stacked, units
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.spaces import avg, fresh, scaled
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding

COMPUTED = "sinusoidal positions are computed from it, not stored"


@architecture("marian", **SIZES, target_vocab="decoder_vocab_size", kind="language", aliases=ALIASES,
              defaults=DEFAULTS | {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": None})  # fmt: skip
def marian(c: Config) -> Spec:
    """Marian: BART with sinusoidal positions, and no norm on the embeddings."""
    width, parts, shared = c["d_model"], parts_of(c), c["share_encoder_decoder_embeddings"]
    generates = not c.is_a("MarianModel")
    vocab = "vocab" if shared else "target_vocab"
    table = "model.shared" if shared and parts == PARTS else "model.decoder.embed_tokens"
    tied = table if table == "model.shared" and c["tie_word_embeddings"] else None
    own = {f"model.{part}.embed_tokens": embedding(f"{tokens} -> words", tied=tied)
           for part, tokens in zip(PARTS, ("vocab", vocab), strict=True) if part in parts}  # fmt: skip
    return Spec(
        stacks={f"model.{part}.layers": Stack(c[f"{part}_layers"], "residual") for part in parts},
        prefix="model.",
        config=cached(c),
        spaces={
            "words": scaled(avg(width), "residual", by=width**0.5 if c["scale_embedding"] else 1.0),
            "residual": avg(width),
            **({"final": avg(width)} if generates else {}),
            **{name: space for part in parts for name, space in units(c, part).items()},
            "vocab": fresh(c["vocab_size"]),
            **({} if shared else {"target_vocab": fresh(c["decoder_vocab_size"] or c["vocab_size"])}),
        },
        fixed={"width": width},
        still={"width": COMPUTED},
        follows={"decoder_vocab_size": "vocab_size"} if shared else {},
        rows={
            **({table: embedding("vocab -> words")} if table == "model.shared" else {}),
            **own,
            # Some files have the positions all the same.
            **{f"model.{part}.embed_positions": embedding("_ -> residual", optional=True) for part in parts},
            **stacked(parts),
            # A decoder alone has logits for vocab_size words, whatever it reads.
            **(
                decoded("final", table if c["tie_word_embeddings"] else None, vocab if parts == PARTS else "vocab")
                if generates
                else {}
            ),
        },
    )
