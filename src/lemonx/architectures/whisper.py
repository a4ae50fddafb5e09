"""Whisper."""

from lemonx.architectures.bart import ALIASES, EPS, PARTS, SIZES, blocks, cached, parts_of, units
from lemonx.errors import Refused
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, embedding, linear


@architecture("whisper", **SIZES, positions="max_target_positions", kind="language",
              aliases=ALIASES | {"num_key_value_heads": "encoder_attention_heads"},
              defaults={"tie_word_embeddings": True, "num_mel_bins": 80, "max_source_positions": 1500,
                                   "max_target_positions": 448})  # fmt: skip
def whisper(c: Config) -> Spec:
    """Whisper: convolutions and GELU on sound, then Pre-LN encoder and decoder, every eps fixed."""
    width, hears = c["d_model"], c.is_a("ForAudioClassification")
    if hears and c.maybe("use_weighted_layer_sum"):
        raise Refused(
            "use_weighted_layer_sum is true, which lemonx does not support", "expand a model where it is false"
        )
    parts = PARTS[:1] if hears else parts_of(c)
    rows, fixed = _classified() if hears else _speaking(c), dict[str, int]()
    spaces = {
        "normed": zero(width),
        "encoded": zero(width),
        **{name: space for part in parts for name, space in units(c, part).items()},
    }
    if "encoder" in parts:
        rows, fixed = _hearing() | rows, {"mels": c["num_mel_bins"], "frames": c["max_source_positions"]}
        spaces |= {"stem": circ(width), "heard": avg(width)}
    if "decoder" in parts:
        spaces |= {
            "residual": avg(width),
            "final": zero(width),
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["max_target_positions"]),
        }
    return Spec(
        stacks={f"model.{part}.layers": Stack(c[f"{part}_layers"], {"encoder": "heard"}.get(part, "residual"))
                for part in parts},
        prefix="model.",
        config=cached(c) if "decoder" in parts else {},
        acts=("heard",) if "encoder" in parts else (),
        spaces=spaces,
        fixed=fixed,
        rows=rows,
        pointers={} if hears else {"alignment_heads": ("model.decoder.layers", "decoder_heads")},
    )  # fmt: skip


def _hearing() -> dict[str, Row]:
    return {
        "model.encoder.conv1": conv("mels -> stem", kernel=1),
        "model.encoder.conv2": conv("stem -> heard", kernel=1),
        "model.encoder.embed_positions": embedding("frames -> heard"),
        **blocks("encoder", "heard", "normed"),
        "model.encoder.layer_norm": layer_norm("heard -> encoded", eps=EPS),
    }


def _speaking(c: Config) -> dict[str, Row]:
    table = "model.decoder.embed_tokens"
    tied = table if c["tie_word_embeddings"] and not c.headless else None
    return {
        table: embedding("vocab -> residual"),
        "model.decoder.embed_positions": embedding("positions -> residual"),
        **blocks("decoder", "residual", "normed", "encoded"),
        "model.decoder.layer_norm": layer_norm("residual -> final", eps=EPS),
        "proj_out": linear("final -> vocab", tied=tied, optional=True),
    }


def _classified() -> dict[str, Row]:
    return {
        "projector": linear("encoded -> _", optional=True),
        "classifier": linear("_ -> _", optional=True),
    }
