"""GPT-2."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.memory import refuse_memory
from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.spaces import avg, circ, fresh, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


@architecture(
    "gpt2",
    width="n_embd",
    depth="n_layer",
    heads="n_head",
    ffn="n_inner",
    vocab="vocab_size",
    positions="n_positions",
    kind="language",
    aliases=ALIASES | {"max_position_embeddings": "n_positions"},
    defaults={
        "n_inner": None,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "summary_proj_to_labels": True,
        "summary_use_proj": True,
    },
)
def gpt2(c: Config) -> Spec:
    """GPT-2: Pre-LN, weights kept as (in, out), fused query, key and value."""
    refuse_memory(c)
    width, layer = c["n_embd"], "transformer.h.*"
    # A class for every choice, or a vector.
    summary = "_" if c["summary_proj_to_labels"] else "summary"
    return Spec(
        stacks={"transformer.h": Stack(c["n_layer"], "residual", period=_period(c))},
        eps="layer_norm_epsilon",
        prefix="transformer.",
        # Without a projection, the logits of a choice are the last norm's output itself.
        shown=("final",) if c.is_a("DoubleHeadsModel") and not c["summary_use_proj"] else (),
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            "heads": circ(c["n_head"]),
            **head(width // c["n_head"], scale=None if c["scale_attn_weights"] else 1.0),
            "hidden": circ(c["n_inner"] or 4 * width),
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["n_positions"]),
            **({} if c["summary_proj_to_labels"] else {"summary": circ(width)}),
        },
        rows={
            "transformer.wte": embedding("vocab -> residual"),
            "transformer.wpe": embedding("positions -> residual"),
            f"{layer}.ln_1": layer_norm("residual -> normed"),
            f"{layer}.attn.c_attn": linear("normed -> (heads query) + (heads key) + (heads value)", transposed=True),
            f"{layer}.attn.c_proj": linear("(heads value) -> residual", transposed=True),
            f"{layer}.attn.bias": dropped(),
            f"{layer}.attn.masked_bias": dropped(),
            f"{layer}.ln_2": layer_norm("residual -> normed"),
            f"{layer}.mlp.c_fc": linear("normed -> hidden", transposed=True),
            f"{layer}.mlp.c_proj": linear("hidden -> residual", transposed=True),
            "transformer.ln_f": layer_norm("residual -> final"),
            **language_model(c.tied("transformer.wte")),
            "multiple_choice_head.summary": linear(f"final -> {summary}", optional=True),
        },
    )


def _period(c: Config) -> int:
    """After how many blocks they repeat.

    Where scores are divided by a block's number, the source's blocks keep theirs: what is added stands behind them,
    and has another number than its origin, be there only one (a period of 1 would say that all blocks are alike).
    """
    return max(2, c["n_layer"]) if c["scale_attn_by_inverse_layer_idx"] else 1
