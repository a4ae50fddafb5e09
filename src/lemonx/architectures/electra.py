"""ELECTRA, generator and discriminator."""

from dataclasses import replace

from lemonx.architectures.bert import DEFAULTS, TYPED, encoder, masked_lm, post_ln
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, zero
from lemonx.specs.spec import Spec
from lemonx.specs.weights import linear


@architecture("electra", **TYPED, embeddings="embedding_size", kind="language",
              defaults=DEFAULTS | {"embedding_size": 128})  # fmt: skip
def electra(c: Config) -> Spec:
    """ELECTRA: BERT with embeddings of another width, heads of a generator and of a discriminator."""
    word, width = c["embedding_size"], c["hidden_size"]
    narrow = word != width
    embedded, normed = ("embedded", "projected") if narrow else ("residual", "residual")
    first: dict[str, Row] = {"electra.embeddings.LayerNorm": layer_norm(f"{embedded} -> {normed}")}
    if narrow:
        first["electra.embeddings_project"] = linear("projected -> residual")
    spec = encoder(c, "electra", _heads(c), post_ln("electra") | {"embedded": first}, embedded=embedded)
    spaces = {"transform": avg(word), "decoded": zero(word)}
    spaces |= {"embedded": avg(word), "projected": zero(word)} if narrow else {}
    # Embeddings as wide as the stream stay so: there is then no projection.
    follows = {} if narrow else {"embedding_size": "hidden_size"}
    return replace(spec, spaces={**spec.spaces, **spaces}, follows=follows)


def _heads(c: Config) -> dict[str, Row]:
    return {
        "discriminator_predictions.dense": linear("residual -> pooled", optional=True),
        "discriminator_predictions.dense_prediction": linear("pooled -> 1", optional=True),
        "classifier": linear(f"{'pooled' if c.is_a('ForMultipleChoice') else 'residual'} -> _", optional=True),
        "classifier.dense": linear("residual -> pooled", optional=True),
        "classifier.out_proj": linear("pooled -> _", optional=True),
        "sequence_summary.summary": linear("residual -> pooled", optional=True),
        "qa_outputs": linear("residual -> _", optional=True),
        **masked_lm(
            c,
            "residual",
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head",
            tied="electra.embeddings.word_embeddings",
        ),
    }
