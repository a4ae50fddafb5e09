"""OPT."""

from lemonx.architectures.heads import language_model
from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, fresh, projection, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import embedding, linear

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
    embedded="word_embed_proj_dim",
    kind="language",
    defaults={"tie_word_embeddings": True, "word_embed_proj_dim": None, "do_layer_norm_before": True,
              "_remove_final_layer_norm": False, "activation_function": "relu", "layer_norm_elementwise_affine": True},
)  # fmt: skip
def opt(c: Config) -> Spec:
    """OPT: LayerNorm with a fixed eps (Post-LN in OPT-350m), perhaps narrower embeddings, learned positions."""
    width, heads, pre = c["hidden_size"], c["num_attention_heads"], c["do_layer_norm_before"]
    word = c["word_embed_proj_dim"] or width
    narrow, affine = word != width, c["layer_norm_elementwise_affine"]
    tied = c.tied("model.decoder.embed_tokens")
    norm = _last_norm(c, own=not narrow and tied is not None)
    final = "final" if norm else "residual"
    last = "projected" if narrow else final
    return Spec(
        stacks={"model.decoder.layers": Stack(c["num_hidden_layers"], "residual")},
        prefix="model.",
        shown=("residual",) if c.headless and not norm and not narrow else (),
        # The width of embeddings is that of the stream unless the source's is another.
        config={} if narrow else {"word_embed_proj_dim": None},
        spaces={
            "residual": avg(width),
            **({"normed": zero(width)} if pre else {}),
            "final": zero(width),
            **({"word": projection(word), "projected": projection(word)} if narrow else {}),
            "heads": circ(heads),
            **head(width // heads),
            "hidden": circ(c["ffn_dim"], act=c["activation_function"]),
            "vocab": fresh(c["vocab_size"]),
            "positions": fresh(c["max_position_embeddings"] + 2),
        },
        rows={
            "model.decoder.embed_tokens": embedding(f"vocab -> {'word' if narrow else 'residual'}"),
            "model.decoder.embed_positions": embedding("positions -> residual"),
            **({"model.decoder.project_in": linear("word -> residual")} if narrow else {}),
            **_block("normed" if pre else "residual", affine),
            **({norm: layer_norm("residual -> final", eps=EPS, affine=affine)} if norm else {}),
            **({"model.decoder.project_out": linear(f"{final} -> projected")} if narrow else {}),
            **language_model(tied, last),
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


def _last_norm(c: Config, own: bool) -> str | None:
    """The norm in front of the head, if there is one; where norms write the stream the last block's, if it is `own`.

    A decoder that is the embedding leaves the scale that it needs to this norm; any other takes it by itself.
    """
    if c["do_layer_norm_before"]:
        return None if c["_remove_final_layer_norm"] else "model.decoder.final_layer_norm"
    return "model.decoder.layers.-1.final_layer_norm" if own else None
