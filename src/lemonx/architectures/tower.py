"""The encoder that CLIP and SigLIP have twice: Pre-LN blocks over text or over patches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lemonx.architectures.rotary import head
from lemonx.checkpoints.plain import JsonValue
from lemonx.specs.config import Config
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
}
TEXT_SIZES = {**SIZES, "vocab": "vocab_size", "positions": "max_position_embeddings"}
# A model of both has its sizes in two parts of config.json.
BOTH_SIZES = {option: (f"text_config.{field}", f"vision_config.{field}") for option, field in SIZES.items()} | {
    option: f"text_config.{TEXT_SIZES[option]}" for option in ("vocab", "positions")
}


def of_both(text: Mapping[str, JsonValue], vision: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The defaults of both parts of config.json."""
    return {f"text_config.{k}": v for k, v in text.items()} | {f"vision_config.{k}": v for k, v in vision.items()}


@dataclass(frozen=True)
class Tower:
    """What an encoder adds to a spec; spaces have the tower's name in front (`text_residual`)."""

    spaces: dict[str, Space]
    rows: dict[str, Row]
    stacks: dict[str, Stack]


def encoder(c: Config, name: str, part: str, positions: int = 1) -> Tower:
    """The blocks of the tower `name`; `part`: where config.json has its fields, `text_config.` or here."""
    width, heads, eps = c[f"{part}hidden_size"], c[f"{part}num_attention_heads"], f"{part}layer_norm_eps"
    layer, t = f"{name}_model.encoder.layers.*", name
    entries = head(width // heads, positions=positions)
    spaces = {
        f"{t}_residual": avg(width, positions),
        f"{t}_normed": zero(width, positions),
        f"{t}_final": zero(width),
        f"{t}_heads": circ(heads, positions),
        **{f"{t}_{entry}": space for entry, space in entries.items()},
        f"{t}_hidden": circ(c[f"{part}intermediate_size"], positions),
    }
    rows: dict[str, Row] = {
        f"{layer}.layer_norm1": layer_norm(f"{t}_residual -> {t}_normed", eps=eps),
        f"{layer}.self_attn.q_proj": linear(f"{t}_normed -> ({t}_heads {t}_query)"),
        f"{layer}.self_attn.k_proj": linear(f"{t}_normed -> ({t}_heads {t}_key)"),
        f"{layer}.self_attn.v_proj": linear(f"{t}_normed -> ({t}_heads {t}_value)"),
        f"{layer}.self_attn.out_proj": linear(f"({t}_heads {t}_value) -> {t}_residual"),
        f"{layer}.layer_norm2": layer_norm(f"{t}_residual -> {t}_normed", eps=eps),
        f"{layer}.mlp.fc1": linear(f"{t}_normed -> {t}_hidden"),
        f"{layer}.mlp.fc2": linear(f"{t}_hidden -> {t}_residual"),
    }
    stack = Stack(c[f"{part}num_hidden_layers"], f"{t}_residual")
    return Tower(spaces, rows, {f"{name}_model.encoder.layers": stack})


def text(c: Config, part: str) -> Tower:
    """An encoder of tokens with learned positions, and a norm behind it."""
    made, eps = encoder(c, "text", part), f"{part}layer_norm_eps"
    spaces = {
        "text_vocab": fresh(c[f"{part}vocab_size"]),
        "text_positions": fresh(c[f"{part}max_position_embeddings"]),
    }
    rows: dict[str, Row] = {
        "text_model.embeddings.token_embedding": embedding("text_vocab -> text_residual"),
        "text_model.embeddings.position_embedding": embedding("text_positions -> text_residual"),
        "text_model.embeddings.position_ids": dropped(),
        "text_model.final_layer_norm": layer_norm("text_residual -> text_final", eps=eps),
    }
    return Tower(made.spaces | spaces, made.rows | rows, made.stacks)


def joined(
    towers: list[Tower],
    rows: dict[str, Row],
    *,
    spaces: Mapping[str, Space] | None = None,
    channels: int = 0,
    **more: Any,
) -> Spec:
    """The spec of one tower or two, with what stands around them."""
    return Spec(
        rows={name: row for tower in towers for name, row in tower.rows.items()} | rows,
        spaces={name: space for tower in towers for name, space in tower.spaces.items()} | dict(spaces or {}),
        stacks={name: stack for tower in towers for name, stack in tower.stacks.items()},
        fixed={"channels": channels} if channels else {},
        **more,
    )
