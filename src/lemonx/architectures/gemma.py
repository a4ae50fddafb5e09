"""Gemma, Gemma 2, Gemma 3 (text)."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.llama import LAYER, MLP, SIZES, attention, check_divisible
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import circ, fresh, grouped, scaled, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}


@architecture("gemma", **SIZES, kind="language", defaults=DEFAULTS | {"num_key_value_heads": 16})
def gemma(c: Config) -> Spec:
    """Gemma: embeddings times the root of the width, norms that keep their gain less one."""
    return _gemma(c, branch="residual", norms={
        f"{LAYER}.input_layernorm": rms_norm("residual -> normed", offset=1.0),
        f"{LAYER}.post_attention_layernorm": rms_norm("residual -> normed", offset=1.0),
    }, scale=None)  # fmt: skip


@architecture("gemma2", **SIZES, kind="language", defaults=DEFAULTS | {"num_key_value_heads": 4})
def gemma2(c: Config) -> Spec:
    """Gemma 2: Gemma with norms before and after every branch, soft caps, alternating windows."""
    check_divisible(c)
    return _gemma(c, branch="branch", norms=_sandwich())


@architecture("gemma3_text", **SIZES, kind="language", defaults=DEFAULTS | {"num_key_value_heads": 4})
def gemma3(c: Config) -> Spec:
    """Gemma 3 (text): Gemma 2 with an RMSNorm on every query and key instead of soft caps."""
    check_divisible(c)
    return _gemma(c, branch="branch", raw="raw_", norms=_sandwich() | {
        f"{LAYER}.self_attn.q_norm": rms_norm("raw_query -> query", offset=1.0),
        f"{LAYER}.self_attn.k_norm": rms_norm("raw_key -> key", offset=1.0),
    })  # fmt: skip


def _sandwich() -> dict[str, Row]:
    return {
        f"{LAYER}.input_layernorm": rms_norm("residual -> normed", offset=1.0),
        f"{LAYER}.post_attention_layernorm": rms_norm("branch -> residual", offset=1.0),
        f"{LAYER}.pre_feedforward_layernorm": rms_norm("residual -> normed", offset=1.0),
        f"{LAYER}.post_feedforward_layernorm": rms_norm("branch -> residual", offset=1.0),
    }


def _gemma(c: Config, branch: str, norms: dict[str, Row], raw: str = "", scale: float | None = 1.0) -> Spec:
    width, heads, head_dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    tied, windows = c.tied("model.embed_tokens"), c["model_type"] != "gemma"
    return Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual", lists=("layer_types",), implied=windows)},
        eps="rms_norm_eps",
        prefix="model.",
        spaces={
            **{name: zero(width) for name in ("residual", branch, "normed", "final")},
            "embedded": scaled(zero(width), "residual", by=width**0.5),
            "kv_heads": circ(c["num_key_value_heads"]),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, rotary(c, head_dim), scale=scale, normed=bool(raw)),
            "hidden": circ(c["intermediate_size"]),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> embedded"),
            **attention(raw, writes=branch),
            **norms,
            **MLP,
            f"{LAYER}.mlp.down_proj": linear(f"hidden -> {branch}"),
            "model.norm": rms_norm("residual -> final", offset=1.0),
            **language_model(tied),
        },
    )
