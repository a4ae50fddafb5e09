"""Swin Transformer V2."""

from lemonx.architectures.heads import images
from lemonx.architectures.patches import merged
from lemonx.specs.config import Config
from lemonx.specs.family import architecture
from lemonx.specs.norms import layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space, avg, circ, key, query, values, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, dropped, linear, parameter


@architecture(
    "swinv2",
    width="embed_dim",
    depth="depths",
    heads="num_heads",
    ffn_ratio="mlp_ratio",
    kind="vision",
    aliases={"num_attention_heads": "num_heads"},
    defaults={"layer_norm_eps": 1e-5, "mlp_ratio": 4.0, "num_channels": 3},
)
def swinv2(c: Config) -> Spec:
    """Swin V2: Res-Post-Norm, shifted windows, patch merging."""
    stages = len(c["depths"])
    spaces: dict[str, Space] = {"final": zero(c["embed_dim"] << stages - 1)}
    rows: dict[str, Row] = {
        "swinv2.embeddings.patch_embeddings.projection": conv("channels -> merged0"),
        "swinv2.embeddings.norm": layer_norm("merged0 -> stage0", eps=1e-5),
        "swinv2.embeddings.position_embeddings": parameter("1 _ stage0", optional=True),
        "swinv2.embeddings.mask_token": parameter("1 1 stage0", optional=True),
        "swinv2.layernorm": layer_norm(f"stage{stages - 1} -> final", optional=c.is_a("Backbone")),
        **images(),
    }
    stacks, fixed = {}, {"channels": c["num_channels"]}
    for i, depth in enumerate(c["depths"]):
        width, at = c["embed_dim"] << i, merged(c, i)
        name = f"swinv2.encoder.layers.{i}"
        stacks[f"{name}.blocks"] = Stack(depth, f"stage{i}", period=2)  # every second block may shift its windows
        head = width // c["num_heads"][i]
        spaces |= {
            # Queries and keys are divided by their length, so what is new in them is zero in both.
            f"query{i}": query(head, scale=1.0, positions=at),
            f"key{i}": key(head, normed=True, positions=at),
            f"value{i}": values(head, at),
            f"merged{i}": avg(width, at),
            f"stage{i}": zero(width, at),
            f"branch{i}": avg(width, at),
            f"heads{i}": circ(c["num_heads"][i], at),
            f"hidden{i}": circ(int(c["mlp_ratio"] * width), at),
        }
        rows |= _block(f"{name}.blocks.*", i)
        if i + 1 < stages:
            rows[f"{name}.downsample.reduction"] = linear(f"(4 stage{i}) -> merged{i + 1}")
            rows[f"{name}.downsample.norm"] = layer_norm(f"merged{i + 1} -> stage{i + 1}", eps=1e-5)
    # The width behind the last stage is written in config.json as well.
    config = {"hidden_size": c["embed_dim"] << stages - 1}
    return Spec(rows, spaces, stacks, fixed, eps="layer_norm_eps", prefix="swinv2.", config=config)


def _block(name: str, i: int) -> dict[str, Row]:
    return {
        f"{name}.attention.self.query": linear(f"stage{i} -> (heads{i} query{i})"),
        f"{name}.attention.self.key": linear(f"stage{i} -> (heads{i} key{i})"),
        f"{name}.attention.self.value": linear(f"stage{i} -> (heads{i} value{i})"),
        f"{name}.attention.self.logit_scale": parameter(f"heads{i} 1 1"),
        f"{name}.attention.self.continuous_position_bias_mlp.0": linear("2 -> 512"),
        f"{name}.attention.self.continuous_position_bias_mlp.2": linear(f"512 -> heads{i}"),
        f"{name}.attention.self.relative_coords_table": dropped(),
        f"{name}.attention.self.relative_position_index": dropped(),
        f"{name}.attention.output.dense": linear(f"(heads{i} value{i}) -> branch{i}"),
        f"{name}.layernorm_before": layer_norm(f"branch{i} -> stage{i}"),
        f"{name}.intermediate.dense": linear(f"stage{i} -> hidden{i}"),
        f"{name}.output.dense": linear(f"hidden{i} -> branch{i}"),
        f"{name}.layernorm_after": layer_norm(f"branch{i} -> stage{i}"),
    }
