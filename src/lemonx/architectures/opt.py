"""OPT."""

from lemonx.architectures.rotary import head
from lemonx.modules import Row, embedding, layer_norm, linear
from lemonx.spec import Config, Spec, Stack, architecture
from lemonx.vectors import avg, circ, fresh, zero

LAYER = "model.decoder.layers.*"
EPS = 1e-5  # of every LayerNorm, in code


@architecture(
    "opt",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    ffn="ffn_dim",
    vocab="vocab_size",
    positions="max_position_embeddings",
    free="language",
    defaults={"tie_word_embeddings": True, "word_embed_proj_dim": None, "do_layer_norm_before": True,
              "_remove_final_layer_norm": False, "activation_function": "relu", "layer_norm_elementwise_affine": True},
)  # fmt: skip
def opt(c: Config) -> Spec:
    """OPT: LayerNorm with a fixed eps (Post-LN in OPT-350m), perhaps narrower embeddings, learned positions."""
    width, heads, pre = c["hidden_size"], c["num_attention_heads"], c["do_layer_norm_before"]
    word = c["word_embed_proj_dim"] or width
    narrow, affine = word != width, c["layer_norm_elementwise_affine"]
    ends = pre and not c["_remove_final_layer_norm"]
    rows, last = _ends(narrow, "final" if ends else "residual", affine if ends else None)
    tied = c.tied("model.decoder.embed_tokens")
    return Spec(
        stacks={"model.decoder.layers": Stack(c["num_hidden_layers"], "residual")},
        prefix="model.",
        # The width of embeddings is that of the stream unless the source's is another.
        config={} if narrow else {"word_embed_proj_dim": None},
        spaces={
            "residual": avg(width),
            **({"normed": zero(width)} if pre else {}),
            **({"final": zero(width)} if ends else {}),
            **({"word": zero(word, linear=True), "projected": zero(word, linear=True)} if narrow else {}),
            "heads": circ(heads),
            **head(width // heads, {}),
            "hidden": circ(c["ffn_dim"], act=c["activation_function"]),
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["max_position_embeddings"] + 2),
        },
        rows={
            **rows,
            "model.decoder.embed_positions": embedding("positions -> residual"),
            **_block("normed" if pre else "residual", affine),
            "lm_head": linear(f"{last} -> vocab", tied=tied, optional=True),
            "score": linear(f"{last} -> _", optional=True),
        },
    )


def _block(normed: str, affine: bool) -> dict[str, Row]:
    """A block; where its norms write the stream they stand behind what they stand before in other OPTs."""
    norm, pre = layer_norm(f"residual -> {normed}", eps=EPS, affine=affine), normed != "residual"
    attended, end = ({f"{LAYER}.{name}_layer_norm": norm} for name in ("self_attn", "final"))
    return {
        **(attended if pre else {}),
        f"{LAYER}.self_attn.q_proj": linear(f"{normed} -> (heads query)"),
        f"{LAYER}.self_attn.k_proj": linear(f"{normed} -> (heads key)"),
        f"{LAYER}.self_attn.v_proj": linear(f"{normed} -> (heads value)"),
        f"{LAYER}.self_attn.out_proj": linear("(heads value) -> residual"),
        **(end if pre else attended),
        f"{LAYER}.fc1": linear(f"{normed} -> hidden"),
        f"{LAYER}.fc2": linear("hidden -> residual"),
        **({} if pre else end),
    }


def _ends(narrow: bool, final: str, affine: bool | None) -> tuple[dict[str, Row], str]:
    """The rows before and after the stack, and what the decoder reads; `affine` is None without a final norm."""
    rows: dict[str, Row] = {"model.decoder.embed_tokens": embedding("vocab -> word" if narrow else "vocab -> residual")}
    if affine is not None:
        rows["model.decoder.final_layer_norm"] = layer_norm("residual -> final", eps=EPS, affine=affine)
    if narrow:
        rows["model.decoder.project_in"] = linear("word -> residual")
        rows["model.decoder.project_out"] = linear(f"{final} -> projected")
    return rows, "projected" if narrow else final
