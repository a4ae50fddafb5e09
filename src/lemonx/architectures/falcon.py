"""Falcon."""

from collections.abc import Mapping
from dataclasses import replace

from lemonx.architectures.heads import language_model
from lemonx.architectures.rotary import head, rotary
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Rotary, Space, alibi, avg, circ, fresh, grouped, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import dropped, embedding, linear

LAYER = "transformer.h.*"
BOUND = "a head's ALiBi slope and its key-value head both follow from its place among all heads"
DEFAULTS = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "alibi": False, "multi_query": True,
            "new_decoder_architecture": False, "parallel_attn": True, "num_ln_in_parallel_attn": None,
            "num_kv_heads": None, "ffn_hidden_size": None}  # fmt: skip


@architecture(
    "falcon",
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    kv_heads="num_kv_heads",
    ffn="ffn_hidden_size",
    vocab="vocab_size",
    kind="language",
    defaults=DEFAULTS,
)
def falcon(c: Config) -> Spec:
    """Falcon: attention and MLP side by side; all layouts of query, key and value; rotary or ALiBi."""
    width, head_dim = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
    # ALiBi is added before the scores are scaled.
    turns = Rotary(still="ALiBi is divided by the root of a head's width") if c["alibi"] else rotary(c, head_dim)
    layout, heads, follows = _heads(c)
    tied = c.tied("transformer.word_embeddings")
    return Spec(
        stacks={"transformer.h": Stack(c["num_hidden_layers"], "residual")},
        eps="layer_norm_epsilon",
        prefix="transformer.",
        follows=follows,
        spaces={
            "residual": avg(width),
            "normed": zero(width),
            "final": zero(width),
            **heads,
            **head(head_dim, turns),
            "hidden": circ(c["ffn_hidden_size"] or 4 * width),
            "vocab": fresh(c["vocab_size"]),
        },
        rows={
            "transformer.word_embeddings": embedding("vocab -> residual"),
            **_norms(c),
            f"{LAYER}.self_attention.query_key_value": linear(f"normed -> {layout}"),
            f"{LAYER}.self_attention.dense": linear("(heads value) -> residual"),
            f"{LAYER}.self_attention.rotary_emb.inv_freq": dropped(),
            f"{LAYER}.mlp.dense_h_to_4h": linear("normed -> hidden"),
            f"{LAYER}.mlp.dense_4h_to_h": linear("hidden -> residual"),
            "transformer.ln_f": layer_norm("residual -> final"),
            **language_model(tied),
        },
    )


def _heads(c: Config) -> tuple[str, Mapping[str, Space], dict[str, str]]:
    """How queries, keys and values lie in one weight, the spaces of heads, and the field that equals their number."""
    count, alone = c["num_attention_heads"], not c["new_decoder_architecture"]
    groups = count if alone else c["num_kv_heads"] or count
    heads = {"heads": alibi(count) if c["alibi"] else circ(count)}
    if alone and c["multi_query"]:
        return "(heads query) + key + value", heads, {}
    if alone or (c["alibi"] and groups == count):
        # Every head has keys and values of its own, and transformers reads the number of these where a file says it.
        same = {"num_kv_heads": "num_attention_heads"} if c.maybe("num_kv_heads") else {}
        return "(heads query) + (heads key) + (heads value) by heads", heads, same
    spaces = {"kv_heads": circ(groups), "heads": grouped(count, under="kv_heads")}
    if c["alibi"]:
        spaces = {name: replace(space, still=BOUND) for name, space in spaces.items()}
    return "(heads query) + (kv_heads key) + (kv_heads value) by kv_heads", spaces, {}


def _norms(c: Config) -> dict[str, Row]:
    two = (c["num_ln_in_parallel_attn"] or (2 if c["new_decoder_architecture"] else 1)) == 2
    if not c["parallel_attn"]:
        names = ("input_layernorm", "post_attention_layernorm")
    else:
        names = ("ln_attn", "ln_mlp") if two else ("input_layernorm",)
    return {f"{LAYER}.{name}": layer_norm("residual -> normed") for name in names}
