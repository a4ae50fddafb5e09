"""Llama, Mistral, Qwen2, Qwen3, Granite, SmolLM3."""

from collections.abc import Mapping
from typing import Any

from lemonx.architectures.heads import language_model
from lemonx.architectures.rotary import head, rotary
from lemonx.errors import BadSizes
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import rms_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
}
DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
LAYER = "model.layers.*"
MLP: Mapping[str, Row] = {
    f"{LAYER}.mlp.gate_proj": linear("normed -> hidden"),
    f"{LAYER}.mlp.up_proj": linear("normed -> hidden", factor=0),
    f"{LAYER}.mlp.down_proj": linear("hidden -> residual"),
}
# Files may say a type for every layer; Qwen's layers have windows behind the first so many.
LAYERS: Mapping[str, Any] = {"lists": ("layer_types",)}
WINDOWS: Mapping[str, Any] = {**LAYERS, "implied": True, "counts": ("max_window_layers",)}
# Classes in which the model is called `transformer`.
QUESTIONS = tuple(f"{name}ForQuestionAnswering" for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3"))
QK_NORMS: Mapping[str, Row] = {
    f"{LAYER}.self_attn.q_norm": rms_norm("raw_query -> query"),
    f"{LAYER}.self_attn.k_norm": rms_norm("raw_key -> key"),
}


def check_divisible(c: Config) -> None:
    """BadSizes if heads do not divide the width: some config classes ask it, though a head is head_dim wide."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if width % heads:
        raise BadSizes(
            f"hidden_size {width} is not a multiple of {heads} heads, and transformers refuses a "
            f"{c['model_type']} without that",
            "choose another --width or --heads",
        )


def attention(raw: str = "", *, writes: str = "residual", out: str = "o_proj") -> dict[str, Row]:
    """Grouped-query attention; `raw`: queries and keys are normed before they meet; `out`: the last map's name."""
    here = f"{LAYER}.self_attn"
    return {
        f"{here}.q_proj": linear(f"normed -> (heads {raw}query)"),
        f"{here}.k_proj": linear(f"normed -> (kv_heads {raw}key)"),
        f"{here}.v_proj": linear("normed -> (kv_heads value)"),
        f"{here}.{out}": linear(f"(heads value) -> {writes}"),
    }


@architecture("llama", **SIZES, kind="language", defaults=DEFAULTS)
@architecture("mistral", **SIZES, kind="language", defaults=DEFAULTS | {"num_key_value_heads": 8})
@architecture("qwen2", **SIZES, kind="language", defaults=DEFAULTS | {"num_key_value_heads": 32})
def llama(c: Config) -> Spec:
    """Llama, Mistral, Qwen2: RMSNorm, grouped-query attention, gated MLP."""
    if c["model_type"] == "llama":
        check_divisible(c)
    return decoder(c, WINDOWS if c["model_type"] == "qwen2" else LAYERS)


@architecture("qwen3", **SIZES, kind="language", defaults=DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128})
def qwen3(c: Config) -> Spec:
    """Qwen3: Llama with an RMSNorm on every query and key."""
    return decoder(c, WINDOWS, qk_norms=QK_NORMS)


@architecture("granite", **SIZES, kind="language", defaults=DEFAULTS)
def granite(c: Config) -> Spec:
    """Granite: Llama with fixed multipliers on embeddings, branches, scores and logits."""
    return decoder(c, scale=1.0)


@architecture("smollm3", **SIZES, kind="language",
              defaults=DEFAULTS | {"num_key_value_heads": 4, "tie_word_embeddings": True})  # fmt: skip
def smollm3(c: Config) -> Spec:
    """SmolLM3: Llama with some layers that turn nothing."""
    return decoder(c, {"lists": ("layer_types", "no_rope_layers"), "implied": True})


def decoder(
    c: Config,
    layers: Mapping[str, Any] = LAYERS,
    *,
    qk_norms: Mapping[str, Row] | None = None,
    scale: float | None = None,
    mlp: Mapping[str, Row] = MLP,
    spaces: Mapping[str, Space] | None = None,
) -> Spec:
    """The table of a Llama, with other rows for its MLP; `layers`: of its stack; `qk_norms`: behind q and k."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim, raw = c["head_dim"] or width // heads, "raw_" if qk_norms else ""
    tied = c.tied("model.embed_tokens")
    spec = Spec(
        stacks={"model.layers": Stack(c["num_hidden_layers"], "residual", **layers)},
        eps="rms_norm_eps",
        prefix="model.",
        config={"head_dim": head_dim},
        spaces={
            **{name: zero(width) for name in ("residual", "normed", "final")},
            "kv_heads": circ(c["num_key_value_heads"] or heads),
            "heads": grouped(heads, under="kv_heads"),
            **head(head_dim, rotary(c, head_dim), scale=scale, normed=qk_norms is not None),
            **(spaces or {"hidden": circ(c["intermediate_size"])}),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "model.embed_tokens": embedding("vocab -> residual"),
            f"{LAYER}.input_layernorm": rms_norm("residual -> normed"),
            **attention(raw),
            f"{LAYER}.self_attn.rotary_emb.inv_freq": dropped(),
            **(qk_norms or {}),
            f"{LAYER}.post_attention_layernorm": rms_norm("residual -> normed"),
            **mlp,
            "model.norm": rms_norm("residual -> final"),
            **language_model(tied),
        },
    )
    return spec.rooted("transformer.") if c.is_a(*QUESTIONS) else spec
