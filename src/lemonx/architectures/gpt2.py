"""GPT-2."""

from lemonx.errors import Refused
from lemonx.modules import dropped, embedding, layer_norm, linear
from lemonx.spec import Config, Spec, Stack, architecture
from lemonx.vectors import avg, circ, zero


@architecture(
    "gpt2",
    width="n_embd",
    depth="n_layer",
    heads="n_head",
    ffn="n_inner",
    free="language",
    defaults={
        "n_inner": None,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_by_inverse_layer_idx": False,
    },
)
def gpt2(c: Config) -> Spec:
    """GPT-2: Pre-LN, weights kept as (in, out), fused query, key and value."""
    if c["scale_attn_by_inverse_layer_idx"]:
        raise Refused("scale_attn_by_inverse_layer_idx ties a block's function to its index: no lossless depth")
    width, layer = c["n_embd"], "transformer.h.*"
    tied = "transformer.wte" if c["tie_word_embeddings"] and not c.headless else None
    return Spec(
        stacks={"transformer.h": Stack(c["n_layer"], "residual")},
        eps="layer_norm_epsilon",
        prefix="transformer.",
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "heads": circ(c["n_head"]),
            "hidden": circ(c["n_inner"] or 4 * width),
        },
        fixed={"vocab": c["vocab_size"], "positions": c["n_positions"], "head_dim": width // c["n_head"]},
        rows={
            "transformer.wte": embedding("vocab -> residual"),
            "transformer.wpe": embedding("positions -> residual"),
            f"{layer}.ln_1": layer_norm("residual -> normed"),
            f"{layer}.attn.c_attn": linear("normed -> (3 heads head_dim)", transposed=True),
            f"{layer}.attn.c_proj": linear("(heads head_dim) -> residual", transposed=True),
            f"{layer}.attn.bias": dropped(),
            f"{layer}.attn.masked_bias": dropped(),
            f"{layer}.ln_2": layer_norm("residual -> normed"),
            f"{layer}.mlp.c_fc": linear("normed -> hidden", transposed=True),
            f"{layer}.mlp.c_proj": linear("hidden -> residual", transposed=True),
            "transformer.ln_f": layer_norm("residual -> final"),
            "lm_head": linear("final -> vocab", tied=tied, optional=True),
            "score": linear("final -> _", optional=True),
        },
    )
