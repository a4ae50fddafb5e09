"""RoBERTa, XLM-RoBERTa, and RoBERTa with Pre-LN: BERT's table with other heads."""

from lemonx.architectures.bert import DEFAULTS, TYPED, encoder, masked_lm, post_ln
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spec import Spec
from lemonx.specs.weights import linear, parameter


@architecture("roberta", "xlm-roberta", **TYPED, kind="language", defaults=DEFAULTS)
def roberta(c: Config) -> Spec:
    """RoBERTa, XLM-RoBERTa: BERT with positions that skip padding, and heads of its own."""
    return encoder(c, "roberta", heads(c, "roberta", "residual"), post_ln("roberta"))


@architecture("roberta-prelayernorm", **TYPED, kind="language", defaults=DEFAULTS)
def roberta_prelayernorm(c: Config) -> Spec:
    """RoBERTa with Pre-LN: a LayerNorm on the embeddings feeds the stream."""
    root = "roberta_prelayernorm"
    return encoder(c, root, heads(c, root, "final"), {
        "embedded": {
            f"{root}.embeddings.LayerNorm": layer_norm("embedded -> residual"),
            f"{root}.encoder.layer.*.attention.LayerNorm": layer_norm("residual -> normed"),
        },
        "attended": {f"{root}.encoder.layer.*.intermediate.LayerNorm": layer_norm("residual -> normed")},
        "end": {f"{root}.LayerNorm": layer_norm("residual -> final")},
    }, normed="normed", embedded="embedded")  # fmt: skip


def heads(c: Config, root: str, final: str) -> dict[str, Row]:
    """RoBERTa's heads: masked LM, texts (a layer and tanh before the last), tokens, answers, choices."""
    reads = "pooled" if c.is_a("ForMultipleChoice") else final
    return {
        f"{root}.pooler.dense": linear(f"{final} -> pooled", optional=True),
        "classifier": linear(f"{reads} -> _", optional=True),
        "classifier.dense": linear(f"{final} -> pooled", optional=True),
        "classifier.out_proj": linear("pooled -> _", optional=True),
        "qa_outputs": linear(f"{final} -> _", optional=True),
        **masked_lm(
            c,
            final,
            "lm_head.dense",
            "lm_head.layer_norm",
            "lm_head.decoder",
            tied=f"{root}.embeddings.word_embeddings",
        ),
        "lm_head.bias": parameter("vocab", optional=True),
    }
