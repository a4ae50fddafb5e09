"""Swin Transformer (the first)."""

from lemonx.architectures.heads import backbone, images
from lemonx.architectures.patches import merged
from lemonx.architectures.rotary import head
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, avg, circ, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, dropped, linear, parameter

EPS = 1e-5  # of the norms around the stages, in code


@architecture(
    "swin",
    width="embed_dim",
    depth="depths",
    heads="num_heads",
    ffn_ratio="mlp_ratio",
    aliases={"num_attention_heads": "num_heads"},
    kind="vision",
    defaults={"layer_norm_eps": 1e-5, "mlp_ratio": 4.0, "num_channels": 3},
)
def swin(c: Config) -> Spec:
    """Swin: Pre-LN, shifted windows with a relative position bias, patch merging."""
    last, shows = len(c["depths"]) - 1, c.is_a("Backbone")
    spaces: dict[str, Space] = {"patches": avg(c["embed_dim"]), "final": zero(c["embed_dim"] << last)}
    rows: dict[str, Row] = {
        "swin.embeddings.patch_embeddings.projection": conv("channels -> patches"),
        "swin.embeddings.norm": layer_norm("patches -> stage0", eps=EPS),
        "swin.embeddings.position_embeddings": parameter("1 _ stage0", optional=True),
        "swin.embeddings.mask_token": parameter("1 1 stage0", optional=True),
        "swin.layernorm": layer_norm(f"stage{last} -> final", optional=shows),
        **images(),
    }
    stacks = {}
    for i, depth in enumerate(c["depths"]):
        width, heads, at = c["embed_dim"] << i, c["num_heads"][i], merged(c, i)
        name = f"swin.encoder.layers.{i}"
        # Every second block shifts its windows, if the image has more than one: its size is not config.json's to say.
        stacks[f"{name}.blocks"] = Stack(depth, f"stage{i}", period=2)
        spaces |= {f"stage{i}": avg(width, at), f"normed{i}": zero(width, at), f"heads{i}": circ(heads, at),
                   f"hidden{i}": circ(int(c["mlp_ratio"] * width), at)}  # fmt: skip
        spaces |= {f"{entry}{i}": space for entry, space in head(width // heads, positions=at).items()}
        rows |= _block(f"{name}.blocks.*", i)
        if i < last:
            spaces[f"merged{i}"] = zero(width, merged(c, i + 1))
            rows[f"{name}.downsample.norm"] = layer_norm(f"(4 stage{i}) -> (4 merged{i})", eps=EPS)
            rows[f"{name}.downsample.reduction"] = linear(f"(4 merged{i}) -> stage{i + 1}")
    given = backbone([c["embed_dim"] << i for i in range(last + 1)], EPS) if shows else ({}, {})
    spaces, rows = spaces | given[0], rows | given[1]
    config = {"hidden_size": c["embed_dim"] << last}
    return Spec(rows, spaces, stacks, {"channels": c["num_channels"]}, "layer_norm_eps", "swin.", config=config)


def _block(name: str, i: int) -> dict[str, Row]:
    return {
        f"{name}.layernorm_before": layer_norm(f"stage{i} -> normed{i}"),
        f"{name}.attention.self.query": linear(f"normed{i} -> (heads{i} query{i})"),
        f"{name}.attention.self.key": linear(f"normed{i} -> (heads{i} key{i})"),
        f"{name}.attention.self.value": linear(f"normed{i} -> (heads{i} value{i})"),
        f"{name}.attention.self.relative_position_bias_table": parameter(f"_ heads{i}"),
        f"{name}.attention.self.relative_position_index": dropped(),
        f"{name}.attention.output.dense": linear(f"(heads{i} value{i}) -> stage{i}"),
        f"{name}.layernorm_after": layer_norm(f"stage{i} -> normed{i}"),
        f"{name}.intermediate.dense": linear(f"normed{i} -> hidden{i}"),
        f"{name}.output.dense": linear(f"hidden{i} -> stage{i}"),
    }
